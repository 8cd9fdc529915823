/* Process 1 of the guest: speaks with the host in frames, and holds still while the machine is saved. */
#define _GNU_SOURCE
#include "streams.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LONGEST_FRAME = 4 << 20, OUT_ROOM = 512 << 10, MOST_COMMANDS = 1000 };
#define CLOCK_TOLERANCE 100000000u /* What a message may take to come here. */

static struct buffer arriving;
static int port, listener; /* One of them, or both once the host has connected. */
static bool quiet;         /* Between QUIESCE and the next life. */

static void handle(const struct header *header, uint8_t *data)
{
    struct command *command = find_command(header->id);
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
