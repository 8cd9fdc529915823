/* The agent of a virtual machine: process 1 of the guest, and the host's only way in.
 *
 * It speaks frames over one virtio-serial port: a header (below, little endian) and `length` bytes. `id` names a
 * command. Streams are bounded: what one side may send before the other has consumed it is WINDOW bytes each.
 * The other end is drivers/agent_channel.py, which has the same numbers.
 */
#ifndef PERILUNE_AGENT_H
#define PERILUNE_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct header {
    uint32_t length;
    uint32_t id;
    uint32_t kind;
};

enum { /* From the host. */
    HELLO = 1,     /* struct hello and the host name: a life begins; answered by READY */
    START,         /* struct start, then NUL-terminated strings: folder, arguments, environment */
    INPUT,         /* bytes for the command's stdin */
    INPUT_END,     /* no more of them */
    KILL,          /* end the command and all that it started */
    CREDIT,        /* struct credit: the host has consumed output */
    QUIESCE,       /* send nothing after QUIESCED until RESUME or HELLO: the machine is about to be saved */
    RESUME,        /* uint64 nanoseconds since 1970: it stood still; time goes on */
    PAD,           /* dropped; overwrites what the transport's buffers held */
    WINDOW_SIZE,   /* uint16 rows, columns of the command's terminal */
};

enum { /* To the host. */
    READY = 65,    /* the 32 characters of the generation */
    OUTPUT,        /* bytes of stdout, or of the terminal */
    ERRORS,        /* bytes of stderr */
    EXITED,        /* struct exited, after all that the command itself wrote */
    CONSUMED,      /* uint32 bytes of INPUT that the command's pipe has taken */
    QUIESCED,      /* uint32 processes of the guest */
};

#define WINDOW (256u << 10)
#define GENERATION 32

enum { TERMINAL = 1, FILE_COMMAND = 2 };

struct hello {
    char generation[GENERATION];
    uint64_t nanoseconds;
    uint8_t seed[64];
    uint64_t disk_bytes;
    uint32_t processes;
    uint32_t open_files;
} __attribute__((packed));

struct start {
    uint64_t nanoseconds;
    uint32_t flags, arguments, variables;
    uint16_t rows, columns;
} __attribute__((packed));

struct credit {
    uint32_t kind, bytes;
} __attribute__((packed));

struct exited {
    int32_t code, signal;
    uint64_t microseconds, resident_bytes;
    uint32_t out_of_memory_kills;
} __attribute__((packed));

/* machine.c: the guest as a whole. */
bool boot(int *port, int *listener);               /* mounts, modules, loopback; the port, or a socket that the host connects to */
void begin_life(const struct hello *hello, size_t length); /* randomness, clock, identity, limits */
void set_clock(uint64_t nanoseconds, uint64_t tolerance); /* unless it is right to that many nanoseconds */
void stop_processes(bool stop);                    /* all but the agent */
void make_group(uint32_t id, char *path, size_t size);     /* a control group for a command; "" if there is none */
uint32_t read_number(const char *path, const char *key);   /* a value of a control file; 0 if there is none */
bool write_text(const char *path, const char *text);
#define BOX "/sys/fs/cgroup/box"

/* command.c: what a child of the agent does; never returns. */
void become(const struct start *start, char *strings, const char *group, const int fds[3]) __attribute__((noreturn));
extern uint32_t open_files;
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
