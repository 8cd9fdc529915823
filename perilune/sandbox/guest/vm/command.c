/* What a child of the agent does: take a command's limits, then run a program or one of the file commands.
 *
 * File commands run here, as the guest would: read PATH LIMIT, write PATH MODE, list PATH, listening, connect PORT.
 * What fails is told on stderr with exit code 1.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOT_EXECUTABLE = 126, NOT_FOUND = 127, CONNECT_SECONDS = 5, PIECE = 65536 };

uint32_t open_files = 1024;
static char piece[PIECE];

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    dprintf(2, "perilune: ");
    vdprintf(2, format, arguments);
    dprintf(2, "\n");
    va_end(arguments);
}

static void fail(const char *text)
{
    dprintf(2, "%s", text);
    _exit(1);
}

static void write_all(int fd, const char *data, size_t size)
{
    while (size) {
        ssize_t count = write(fd, data, size);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            fail(strerror(errno));
        data += count, size -= count;
    }
}

static void read_file(const char *path, unsigned long long limit)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) < 0)
        fail(strerror(errno));
    if (!S_ISREG(info.st_mode))
        fail("is not a regular file");
    unsigned long long total = 0;
    if ((unsigned long long)info.st_size > limit) {
        dprintf(2, "%lld bytes, more than the %llu asked for", (long long)info.st_size, limit);
        _exit(1);
    }
    for (ssize_t count; (count = read(fd, piece, PIECE)) != 0;) {
        if (count < 0)
            fail(strerror(errno));
        if ((total += count) > limit) {
            dprintf(2, "more than %llu bytes", limit);
            _exit(1);
        }
        write_all(1, piece, count);
    }
}

static void make_folders(char *path)
{
    for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        if (mkdir(path, 0777) < 0 && errno != EEXIST)
            fail(strerror(errno));
    }
}

/* Through links, as a program would write; a new name and a rename, so that a reader never sees half of it. */
static void write_file(const char *given, unsigned mode)
{
    char path[PATH_MAX], temporary[PATH_MAX + 40];
    struct stat info;
    if (!realpath(given, path) && snprintf(path, sizeof path, "%s", given) >= (int)sizeof path)
        fail(strerror(ENAMETOOLONG));
    make_folders(path);
    if (lstat(path, &info) == 0 && !S_ISREG(info.st_mode))
        fail("is not a regular file");
    snprintf(temporary, sizeof temporary, "%s.perilune-%d", path, getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        fail(strerror(errno));
    for (ssize_t count; (count = read(0, piece, PIECE)) != 0;) {
        const char *data = piece;
        while (count > 0) {
            ssize_t written = write(fd, data, count);
            if (written < 0)
                break;
            data += written, count -= written;
        }
        if (count) {
            int error = errno;
            unlink(temporary);
            fail(strerror(error));
        }
    }
    if (fchmod(fd, mode) < 0 || close(fd) < 0 || rename(temporary, path) < 0) {
        int error = errno;
        unlink(temporary);
        fail(strerror(error));
    }
}

/* One entry: kind size mode nanoseconds name, and a NUL. */
static void list_folder(const char *path)
{
    DIR *folder = opendir(path);
    if (!folder)
        fail(strerror(errno));
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") ||
            fstatat(dirfd(folder), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        const char *kind = S_ISDIR(info.st_mode) ? "folder" : S_ISREG(info.st_mode) ? "file" : S_ISLNK(info.st_mode) ? "link" : "other";
        int length = snprintf(piece, PIECE, "%s %lld %u %lld %s", kind, (long long)info.st_size, info.st_mode & 07777,
                              info.st_mtim.tv_sec * 1000000000ll + info.st_mtim.tv_nsec, entry->d_name);
        write_all(1, piece, length + 1);
    }
}

static void listening(void)
{
    const char *tables[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    for (int number = 0; number < 2; number++) {
        FILE *file = fopen(tables[number], "re");
        char line[512], local[128], remote[128];
        unsigned state, port;
        while (file && fgets(line, sizeof line, file))
            if (sscanf(line, " %*d: %127s %127s %x", local, remote, &state) == 3 && state == 10 &&
                sscanf(strrchr(local, ':') + 1, "%x", &port) == 1) {
                snprintf(line, sizeof line, "%u\n", port);
                write_all(1, line, strlen(line));
            }
        if (file)
            fclose(file);
    }
}

static int dial(int family, int port)
{
    struct timeval patience = {.tv_sec = CONNECT_SECONDS};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    bool four_wanted = family == AF_INET;
    if (connect(fd, four_wanted ? (void *)&four : (void *)&six, four_wanted ? sizeof four : sizeof six) == 0) {
        patience.tv_sec = 0;
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Relays stdin to the port and the port to stdout; "+" on stderr says that it is connected. */
static void connect_port(int port)
{
    int fd = dial(AF_INET, port);
    if (fd < 0) {
        int error = errno;
        if ((fd = dial(AF_INET6, port)) < 0)
            fail(strerror(error));
    }
    write_all(2, "+", 1);
    struct pollfd waiting[2] = {{.fd = 0, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
    while (poll(waiting, 2, -1) >= 0) {
        for (int number = 0; number < 2; number++) {
            if (waiting[number].fd < 0 || !waiting[number].revents)
                continue;
            ssize_t count = read(waiting[number].fd, piece, PIECE);
            if (count > 0)
                write_all(number ? 1 : fd, piece, count);
            else if (number)
                return;
            else {
                shutdown(fd, SHUT_WR);
                waiting[0].fd = -1;
            }
        }
    }
}

static void file_command(char **words)
{
    if (!strcmp(words[0], "read"))
        read_file(words[1], strtoull(words[2], NULL, 10));
    else if (!strcmp(words[0], "write"))
        write_file(words[1], strtoul(words[2], NULL, 10));
    else if (!strcmp(words[0], "list"))
        list_folder(words[1]);
    else if (!strcmp(words[0], "listening"))
        listening();
    else if (!strcmp(words[0], "connect"))
        connect_port(atoi(words[1]));
    else
        fail("no such file command");
    _exit(0);
}

static void execute(char **words, char **variables)
{
    const char *path = "";
    for (char **variable = variables; *variable; variable++)
        if (!strncmp(*variable, "PATH=", 5))
            path = *variable + 5;
    int failure = ENOENT;
    if (strchr(words[0], '/')) {
        execve(words[0], words, variables);
        failure = errno;
    } else {
        for (const char *end; ; path = end + 1) {
            char whole[PATH_MAX];
            end = strchrnul(path, ':');
            if (snprintf(whole, sizeof whole, "%.*s/%s", (int)(end - path), path, words[0]) < (int)sizeof whole) {
                execve(whole, words, variables);
                if (errno != ENOENT && errno != ENOTDIR)
                    failure = errno;
            }
            if (!*end)
                break;
        }
    }
    say("cannot execute '%s': %s", words[0], strerror(failure));
    _exit(failure == ENOENT || failure == ENOTDIR ? NOT_FOUND : NOT_EXECUTABLE);
}

void become(const struct start *start, char *strings, const char *group, const int fds[3])
{
    signal(SIGPIPE, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    for (int number = 0; number < 3; number++)
        dup2(fds[number], number); /* All others close themselves at an exec. */
    if (start->flags & TERMINAL)
        ioctl(0, TIOCSCTTY, 0);
    char procs[200];
    snprintf(procs, sizeof procs, "%s/cgroup.procs", group);
    write_text("/proc/self/oom_score_adj", "500");
    if (group[0] && !write_text(procs, "0")) {
        say("cannot start a process: %s; raise limits.processes or end some", strerror(errno));
        _exit(NOT_EXECUTABLE);
    }
    struct rlimit files = {open_files, open_files}, no_core = {0, 0};
    setrlimit(RLIMIT_NOFILE, &files);
    setrlimit(RLIMIT_CORE, &no_core);
    umask(022);
    char *folder = strings;
    char **words = calloc(start->arguments + start->variables + 2, sizeof *words);
    char **variables = words + start->arguments + 1;
    char *next = folder + strlen(folder) + 1;
    for (uint32_t number = 0; number < start->arguments; number++, next += strlen(next) + 1)
        words[number] = next;
    for (uint32_t number = 0; number < start->variables; number++, next += strlen(next) + 1)
        variables[number] = next;
    if (start->flags & FILE_COMMAND) {
        close_range(3, ~0u, 0); /* Among them the agent's end of this command's own stdin. */
        file_command(words);
    }
    if (chdir(folder) < 0) {
        say("cannot enter the folder '%s': %s", folder, strerror(errno));
        _exit(NOT_EXECUTABLE);
    }
    execute(words, variables);
    _exit(NOT_EXECUTABLE);
}
