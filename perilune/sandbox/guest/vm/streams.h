/* Started commands and their streams: what the agent keeps of each, and the frames that wait for the host. */
#ifndef PERILUNE_STREAMS_H
#define PERILUNE_STREAMS_H

#include "agent.h"

enum { PIECE = 32768 };

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

extern struct command *commands;
extern struct buffer leaving; /* Frames for the host. */

void append(struct buffer *buffer, const void *data, size_t size); /* data NULL: only room */
void send_frame(uint32_t kind, uint32_t id, const void *data, size_t size);
struct command *find_command(uint32_t id);
void start_command(uint32_t id, uint8_t *data);
void write_input(struct command *command);
void read_output(struct command *command, int stream);
void kill_command(struct command *command);
void detach_all(void);  /* their owner's life has ended */
void reap(void);
void sweep(void);       /* free what is gone */

#endif
