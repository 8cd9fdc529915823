/* Commands and their streams: pipes or a terminal each, bounded by what the host and the command have taken. */
#define _GNU_SOURCE
#include "streams.h"

#include <errno.h>
#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

struct command *commands;
struct buffer leaving;
static char (*old_groups)[64];
static size_t old_group_count;

void append(struct buffer *buffer, const void *data, size_t size)
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

void send_frame(uint32_t kind, uint32_t id, const void *data, size_t size)
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

void sweep(void)
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

void start_command(uint32_t id, uint8_t *data)
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
void detach_all(void)
{
    for (struct command *command = commands; command; command = command->next) {
        command->detached = true;
        finish_if_drained(command);
    }
}

void write_input(struct command *command)
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

void read_output(struct command *command, int stream)
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

void reap(void)
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

void kill_command(struct command *command)
{
    char path[100];
    snprintf(path, sizeof path, "%s/cgroup.kill", command->group);
    if (!command->group[0] || !write_text(path, "1"))
        kill(-command->pid, SIGKILL);
}

struct command *find_command(uint32_t id)
{
    struct command *command = commands;
    while (command && (command->id != id || command->detached || command->gone))
        command = command->next;
    return command;
}
