/* Process 1 of the guest: starts commands, passes their streams on in frames, reaps, and holds still while it is saved. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PIECE = 32768, LONGEST_FRAME = 4 << 20, OUT_ROOM = 512 << 10, MOST_COMMANDS = 1000 };
#define CLOCK_TOLERANCE 100000000u /* What a message may take to come here. */

struct buffer {
    uint8_t *data;
    size_t start, end, room;
};

struct command {
    struct command *next;
    uint32_t id;
    pid_t pid;               /* 0 once it was reaped */
    int input, output[2];    /* -1: closed; a terminal is input and output[0] */
    uint32_t credit[2];      /* bytes of output that the host takes now */
    int left[2];             /* after its end: bytes of its pipes that are its own */
    struct buffer pending;   /* of its input */
    bool input_ended, ended, detached, terminal, gone;
    struct exited result;
    char group[64];
};

static struct command *commands;
static char (*old_groups)[64];
static size_t old_group_count;
static struct buffer arriving, leaving;
static int port, listener; /* One of them, or both once the host has connected. */
static bool quiet; /* Between QUIESCE and the next life. */

static void append(struct buffer *buffer, const void *data, size_t size)
{
    if (buffer->start == buffer->end)
        buffer->start = buffer->end = 0;
    if (buffer->end + size > buffer->room) {
        /* What was in it may have been a secret: nothing is left behind by moving. */
        size_t held = buffer->end - buffer->start, room = (held + size) * 2;
        if (held + size > buffer->room) {
            uint8_t *larger = malloc(room);
            memcpy(larger, buffer->data + buffer->start, held);
            explicit_bzero(buffer->data, buffer->room);
            free(buffer->data);
            buffer->data = larger, buffer->room = room;
        } else {
            memmove(buffer->data, buffer->data + buffer->start, held);
            explicit_bzero(buffer->data + held, buffer->end - held);
        }
        buffer->start = 0, buffer->end = held;
    }
    if (data)
        memcpy(buffer->data + buffer->end, data, size);
    buffer->end += size;
}

static void send_frame(uint32_t kind, uint32_t id, const void *data, size_t size)
{
    struct header header = {size, id, kind};
    append(&leaving, &header, sizeof header);
    append(&leaving, data, size);
}

static void close_input(struct command *command)
{
    if (command->input >= 0 && !command->terminal)
        close(command->input);
    command->input = -1;
    command->pending.start = command->pending.end = 0;
}

/* Groups whose processes outlived their command are tried again when the next one ends. */
static void remove_group(const char *group)
{
    size_t kept = 0;
    if (group[0] && rmdir(group) < 0 && errno == EBUSY) {
        old_groups = realloc(old_groups, (old_group_count + 1) * sizeof *old_groups);
        memcpy(old_groups[old_group_count++], group, sizeof *old_groups);
    }
    for (size_t number = 0; number < old_group_count; number++)
        if (rmdir(old_groups[number]) < 0 && errno == EBUSY)
            memmove(old_groups[kept++], old_groups[number], sizeof *old_groups);
    old_group_count = kept;
}

/* Its memory is freed by sweep(), when nothing on the stack refers to it. */
static void forget(struct command *command)
{
    command->gone = true;
    close_input(command);
    for (int stream = 0; stream < 2; stream++) {
        if (command->output[stream] >= 0)
            close(command->output[stream]);
        command->output[stream] = -1;
    }
    remove_group(command->group);
}

static void sweep(void)
{
    for (struct command **link = &commands; *link;) {
        struct command *command = *link;
        if (!command->gone) {
            link = &command->next;
            continue;
        }
        *link = command->next;
        free(command->pending.data);
        free(command);
    }
}

static void finish_if_drained(struct command *command)
{
    if (command->gone || !command->ended || command->left[0] > 0 || command->left[1] > 0)
        return;
    if (!command->detached)
        send_frame(EXITED, command->id, &command->result, sizeof command->result);
    forget(command);
}

static void close_all(int *fds, int count)
{
    for (int number = 0; number < count; number++)
        if (fds[number] >= 0)
            close(fds[number]);
}

/* Fills in the agent's ends and `its`, the command's: stdin, stdout, stderr. */
static bool open_streams(struct command *command, const struct start *start, int its[3])
{
    its[0] = its[1] = its[2] = command->input = command->output[0] = command->output[1] = -1;
    if (command->terminal) {
        struct winsize window = {.ws_row = start->rows, .ws_col = start->columns};
        if (openpty(&command->input, &its[0], NULL, NULL, &window) < 0)
            return false;
        fcntl(command->input, F_SETFD, FD_CLOEXEC);
        fcntl(its[0], F_SETFD, FD_CLOEXEC);
        command->output[0] = command->input;
        return true;
    }
    for (int number = 0; number < 3; number++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) < 0)
            return false;
        its[number] = ends[number > 0];
        *(number ? &command->output[number - 1] : &command->input) = ends[number == 0];
    }
    return true;
}

static void start_command(uint32_t id, uint8_t *data)
{
    const struct start *start = (struct start *)data;
    struct command *command = calloc(1, sizeof *command);
    int its[3];
    command->id = id;
    command->terminal = start->flags & TERMINAL;
    command->credit[0] = command->credit[1] = WINDOW;
    command->next = commands;
    commands = command;
    bool opened = open_streams(command, start, its);
    if (opened) {
        make_group(id, command->group, sizeof command->group);
        command->pid = fork();
        if (command->pid == 0) {
            const int theirs[3] = {its[0], its[command->terminal ? 0 : 1], its[command->terminal ? 0 : 2]};
            become(start, (char *)data + sizeof *start, command->group, theirs);
        }
    }
    if (!opened || command->pid < 0) {
        char text[200];
        int length = snprintf(text, sizeof text, "perilune: cannot start a process: %s\n", strerror(errno));
        struct exited result = {.code = 126};
        close_all(its, 3);
        send_frame(ERRORS, id, text, length);
        send_frame(EXITED, id, &result, sizeof result);
        return forget(command);
    }
    close_all(its, 3);
    for (int stream = 0; stream < 2; stream++)
        if (command->output[stream] >= 0)
            fcntl(command->output[stream], F_SETFL, O_NONBLOCK);
    fcntl(command->input, F_SETFL, O_NONBLOCK);
}

/* What a command of an ended life writes has no reader any more: it is taken and dropped, so that the command runs on. */
static void detach_all(void)
{
    for (struct command *command = commands; command; command = command->next) {
        command->detached = true;
        finish_if_drained(command);
    }
}

static void write_input(struct command *command)
{
    struct buffer *pending = &command->pending;
    while (command->input >= 0 && pending->start < pending->end) {
        ssize_t count = write(command->input, pending->data + pending->start, pending->end - pending->start);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        uint32_t taken = count < 0 ? pending->end - pending->start : (size_t)count; /* It reads no more: all is taken. */
        explicit_bzero(pending->data + pending->start, taken);
        pending->start += taken;
        if (!command->detached)
            send_frame(CONSUMED, command->id, &taken, sizeof taken);
        if (count < 0)
            close_input(command);
    }
    if (command->input_ended && pending->start == pending->end)
        close_input(command);
}

static void close_output(struct command *command, int stream)
{
    if (command->terminal)
        command->input = -1;
    close(command->output[stream]);
    command->output[stream] = -1;
    command->left[stream] = 0;
}

static void read_output(struct command *command, int stream)
{
    static uint8_t piece[PIECE];
    size_t most = PIECE;
    if (!command->detached && command->credit[stream] < most)
        most = command->credit[stream];
    if (command->ended && (size_t)command->left[stream] < most)
        most = command->left[stream];
    ssize_t count = read(command->output[stream], piece, most);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        count = 0; /* Nothing is left of what it had written. */
    else if (count <= 0) { /* The end; a terminal says EIO. */
        close_output(command, stream);
        return finish_if_drained(command);
    }
    if (count > 0 && !command->detached) {
        send_frame(stream ? ERRORS : OUTPUT, command->id, piece, count);
        command->credit[stream] -= count;
    }
    if (count > 0)
        explicit_bzero(piece, count);
    if (command->ended) {
        command->left[stream] = count > 0 ? command->left[stream] - count : 0;
        finish_if_drained(command);
    }
}

static void reap(void)
{
    int status;
    struct rusage usage;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;)
        for (struct command *command = commands; command; command = command->next) {
            if (command->pid != pid)
                continue;
            command->pid = 0;
            command->ended = true;
            close_input(command);
            int by = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            command->result = (struct exited){
                .code = by ? 128 + by : WEXITSTATUS(status), .signal = by,
                .microseconds = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000ull + usage.ru_utime.tv_usec +
                                usage.ru_stime.tv_usec,
                .resident_bytes = usage.ru_maxrss * 1024ull,
                .out_of_memory_kills = read_number(BOX "/memory.events", "oom_kill "),
            };
            for (int stream = 0; stream < 2; stream++)
                if (command->output[stream] < 0 || ioctl(command->output[stream], FIONREAD, &command->left[stream]) < 0)
                    command->left[stream] = 0;
            finish_if_drained(command);
            break;
        }
}

static void kill_command(struct command *command)
{
    char path[100];
    snprintf(path, sizeof path, "%s/cgroup.kill", command->group);
    if (!command->group[0] || !write_text(path, "1"))
        kill(-command->pid, SIGKILL);
}

static void handle(const struct header *header, uint8_t *data)
{
    struct command *command = commands;
    while (command && (command->id != header->id || command->detached || command->gone))
        command = command->next;
    switch (header->kind) {
    case HELLO:
        detach_all();
        begin_life((struct hello *)data, header->length);
        stop_processes(false);
        leaving.start = leaving.end = 0;
        quiet = false;
        send_frame(READY, 0, data, GENERATION);
        break;
    case QUIESCE: {
        uint32_t processes = read_number(BOX "/pids.current", "");
        stop_processes(true);
        send_frame(QUIESCED, 0, &processes, sizeof processes);
        quiet = true;
        break;
    }
    case RESUME:
        set_clock(*(uint64_t *)data, 0);
        stop_processes(false);
        quiet = false;
        break;
    case START:
        set_clock(((struct start *)data)->nanoseconds, CLOCK_TOLERANCE);
        start_command(header->id, data);
        break;
    case INPUT:
        if (command && command->input >= 0) {
            append(&command->pending, data, header->length);
            write_input(command);
        } else if (command)
            send_frame(CONSUMED, header->id, &header->length, 4);
        break;
    case INPUT_END:
        if (command) {
            command->input_ended = true;
            write_input(command);
        }
        break;
    case KILL:
        if (command && command->pid)
            kill_command(command);
        break;
    case CREDIT:
        if (command)
            command->credit[((struct credit *)data)->kind == ERRORS] += ((struct credit *)data)->bytes;
        break;
    case WINDOW_SIZE:
        if (command && command->terminal && command->input >= 0) {
            struct winsize window = {.ws_row = ((uint16_t *)data)[0], .ws_col = ((uint16_t *)data)[1]};
            ioctl(command->input, TIOCSWINSZ, &window);
        }
    }
    explicit_bzero(data, header->length); /* It may have been a secret. */
}

static void receive(void)
{
    append(&arriving, NULL, PIECE);
    arriving.end -= PIECE;
    ssize_t count = read(port, arriving.data + arriving.end, PIECE);
    if (count <= 0) {
        if (count == 0 || errno != EAGAIN) {
            if (listener >= 0)
                close(port), port = -1;
            else
                usleep(2000); /* The host's end is closed; it opens again with a new life. */
        }
        return;
    }
    arriving.end += count;
    struct header header;
    while (arriving.end - arriving.start >= sizeof header) {
        memcpy(&header, arriving.data + arriving.start, sizeof header);
        if (header.length > LONGEST_FRAME) {
            arriving.start = arriving.end = 0; /* No frame of ours. */
            return;
        }
        if (arriving.end - arriving.start < sizeof header + header.length)
            return;
        uint8_t *data = arriving.data + arriving.start + sizeof header;
        arriving.start += sizeof header + header.length;
        handle(&header, data);
    }
}

/* The host speaks through its newest connection; what was on its way through an older one is of an ended life. */
static void accept_host(void)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return;
    if (port >= 0)
        close(port);
    port = fd;
    arriving.start = arriving.end = leaving.start = leaving.end = 0;
}

static void transmit(void)
{
    ssize_t count = write(port, leaving.data + leaving.start, leaving.end - leaving.start);
    if (count > 0) {
        explicit_bzero(leaving.data + leaving.start, count);
        leaving.start += count;
    }
}

int main(void)
{
    static struct pollfd waiting[3 * MOST_COMMANDS + 3];
    static struct { struct command *command; int stream; } whose[3 * MOST_COMMANDS + 3]; /* stream 2: input */
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    signal(SIGPIPE, SIG_IGN);
    int deaths = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (!boot(&port, &listener)) {
        say("the host's port does not appear");
        return 1; /* Process 1 ends: the kernel panics, and the driver sees the machine end. */
    }
    for (;;) {
        bool full = leaving.end - leaving.start > OUT_ROOM;
        int count = 3;
        waiting[0] = (struct pollfd){.fd = port, .events = POLLIN | (leaving.start < leaving.end ? POLLOUT : 0)};
        waiting[1] = (struct pollfd){.fd = quiet ? -1 : deaths, .events = POLLIN};
        waiting[2] = (struct pollfd){.fd = listener, .events = POLLIN};
        for (struct command *command = commands; command && !quiet && count + 3 < (int)(sizeof waiting / sizeof *waiting);
             command = command->next) {
            for (int stream = 0; stream < 2; stream++) {
                bool wanted = command->detached || (!full && command->credit[stream]);
                if (command->output[stream] >= 0 && wanted && (!command->ended || command->left[stream])) {
                    whose[count].command = command, whose[count].stream = stream;
                    waiting[count++] = (struct pollfd){.fd = command->output[stream], .events = POLLIN};
                }
            }
            if (command->input >= 0 && command->pending.start < command->pending.end) {
                whose[count].command = command, whose[count].stream = 2;
                waiting[count++] = (struct pollfd){.fd = command->input, .events = POLLOUT};
            }
        }
        if (poll(waiting, count, -1) < 0)
            continue;
        for (int number = 3; number < count; number++) {
            struct command *command = whose[number].command;
            if (!waiting[number].revents || command->gone)
                continue;
            if (whose[number].stream == 2)
                write_input(command);
            else if (command->output[whose[number].stream] >= 0)
                read_output(command, whose[number].stream);
        }
        if (waiting[1].revents) {
            struct signalfd_siginfo info;
            while (read(deaths, &info, sizeof info) > 0)
                ;
            reap();
        }
        if (waiting[0].revents & (POLLIN | POLLHUP | POLLERR))
            receive();
        if (port >= 0 && leaving.start < leaving.end && (waiting[0].revents & POLLOUT || !full))
            transmit();
        if (waiting[2].revents)
            accept_host();
        sweep();
    }
}
