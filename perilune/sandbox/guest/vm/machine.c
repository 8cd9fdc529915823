/* The guest as a whole: what is mounted, which modules run, and what makes each life of one snapshot its own. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <linux/vm_sockets.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PORT_NAME "perilune"
#define HOST_PORT 1024
#define BOOT_ID "/run/perilune/boot_id"
#define STOP_TRIES 200

static uint64_t image_bytes; /* Of the root file system as it came. */

bool write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return false;
    bool whole = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return whole;
}

static size_t read_text(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? 0 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[count > 0 ? count : 0] = 0;
    return count > 0 ? (size_t)count : 0;
}

uint32_t read_number(const char *path, const char *key)
{
    char text[4096];
    read_text(path, text, sizeof text);
    char *found = strstr(text, key);
    return found ? strtoul(found + strlen(key), NULL, 10) : 0;
}

static void show(const char *kind, const char *path, unsigned long flags, const char *options)
{
    mkdir(path, 0755);
    if (mount(kind, path, kind, flags, options) < 0)
        say("cannot mount %s: %s", path, strerror(errno));
}

/* Modules lie in /perilune in the order in which they are needed; their parameters are on the kernel's command line. */
static void load_modules(void)
{
    char line[8192], list[1024];
    read_text("/proc/cmdline", line, sizeof line);
    read_text("/perilune/modules", list, sizeof list);
    for (char *rest = list, *name; (name = strsep(&rest, "\n"));) {
        if (!*name)
            continue;
        char path[300], wanted[200], parameters[2048] = "", copy[8192];
        snprintf(path, sizeof path, "/perilune/%s.ko", name);
        snprintf(wanted, sizeof wanted, "%s.", name);
        strcpy(copy, line);
        for (char *words = copy, *word; (word = strsep(&words, " \n"));)
            if (!strncmp(word, wanted, strlen(wanted)) && strlen(parameters) + strlen(word) + 2 < sizeof parameters)
                strcat(strcat(parameters, word + strlen(wanted)), " ");
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || (syscall(SYS_finit_module, fd, parameters, 0) < 0 && errno != EEXIST))
            say("module %s: %s", name, strerror(errno));
        close(fd);
    }
}

static int find_port(void)
{
    DIR *folder = opendir("/sys/class/virtio-ports");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[600], name[64];
        snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
        read_text(path, name, sizeof name);
        if (strncmp(name, PORT_NAME, strlen(PORT_NAME)))
            continue;
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        closedir(folder);
        return open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    }
    if (folder)
        closedir(folder);
    return -1;
}

/* A monitor without a serial port for us (Firecracker) has sockets between host and guest. */
static int listen_to_host(void)
{
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_port = HOST_PORT, .svm_cid = VMADDR_CID_ANY};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && (bind(fd, (void *)&address, sizeof address) < 0 || listen(fd, 4) < 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

static void raise_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ioctl(fd, SIOCGIFFLAGS, &request);
    request.ifr_flags |= IFF_UP;
    if (ioctl(fd, SIOCSIFFLAGS, &request) < 0)
        say("no loopback: %s", strerror(errno));
    close(fd);
}

bool boot(int *port, int *listener)
{
    struct statvfs root;
    if (statvfs("/", &root) == 0)
        image_bytes = (uint64_t)(root.f_blocks - root.f_bfree) * root.f_frsize;
    show("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    show("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    show("devtmpfs", "/dev", MS_NOSUID, "mode=0755");
    show("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666");
    show("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
    show("cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    symlink("/proc/self/fd", "/dev/fd");
    symlink("/proc/self/fd/0", "/dev/stdin");
    symlink("/proc/self/fd/1", "/dev/stdout");
    symlink("/proc/self/fd/2", "/dev/stderr");
    write_text("/proc/self/oom_score_adj", "-1000");
    write_text("/sys/fs/cgroup/cgroup.subtree_control", "+pids +memory");
    mkdir(BOX, 0755);
    mkdir("/run/perilune", 0755);
    write_text(BOOT_ID, "");
    if (mount(BOOT_ID, "/proc/sys/kernel/random/boot_id", NULL, MS_BIND, NULL) < 0)
        say("boot id: %s", strerror(errno));
    /* The agent and the kernel keep a part of the memory for themselves, so that a full guest still answers. */
    char text[2048];
    uint64_t kilobytes = read_number("/proc/meminfo", "MemTotal:");
    snprintf(text, sizeof text, "%llu", (unsigned long long)(kilobytes - kilobytes / 16 - 8192) << 10);
    write_text(BOX "/memory.max", text);
    raise_loopback();
    load_modules();
    read_text("/proc/cmdline", text, sizeof text);
    if (strstr(text, "perilune.vsock")) {
        *port = -1;
        return (*listener = listen_to_host()) >= 0;
    }
    *listener = -1;
    for (int tries = 0; tries < 2000 && (*port = find_port()) < 0; tries++)
        usleep(5000); /* The driver asks the host for the port's name. */
    return *port >= 0;
}

void set_clock(uint64_t nanoseconds, uint64_t tolerance)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t here = now.tv_sec * 1000000000ull + now.tv_nsec;
    if ((here > nanoseconds ? here - nanoseconds : nanoseconds - here) < tolerance)
        return;
    now = (struct timespec) {.tv_sec = nanoseconds / 1000000000u, .tv_nsec = nanoseconds % 1000000000u};
    if (clock_settime(CLOCK_REALTIME, &now) < 0)
        say("clock: %s", strerror(errno));
}

/* The kernel's generator continues from the host's seed; without this all copies of one snapshot draw the same numbers. */
static void reseed(const uint8_t seed[64])
{
    struct {
        int bits, bytes;
        uint8_t data[64];
    } pool = {512, 64, {0}};
    memcpy(pool.data, seed, 64);
    int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0)
        say("randomness: %s", strerror(errno));
    close(fd);
    explicit_bzero(&pool, sizeof pool);
}

static void new_boot_id(void)
{
    uint8_t b[16];
    char text[40];
    if (syscall(SYS_getrandom, b, sizeof b, 0) != sizeof b)
        return;
    b[6] = (b[6] & 15) | 64;
    b[8] = (b[8] & 63) | 128;
    snprintf(text, sizeof text, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x\n", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    write_text(BOOT_ID, text);
}

/* Each copy of a snapshot pays for this again, in code that its emulator has not yet translated: what is as it was is left. */
static void limit_disk(const char *path, uint64_t bytes, uint64_t *now)
{
    char text[64];
    snprintf(text, sizeof text, "size=%llu", (unsigned long long)bytes);
    if (*now != bytes && mount(NULL, path, NULL, MS_REMOUNT, text) < 0)
        say("disk limit of %s: %s", path, strerror(errno));
    *now = bytes;
}

void begin_life(const struct hello *hello, size_t length)
{
    static uint64_t root, shared;
    static uint32_t processes;
    char text[160];
    set_clock(hello->nanoseconds, 0);
    reseed(hello->seed);
    new_boot_id();
    const char *name = (const char *)(hello + 1);
    sethostname(name, length - sizeof *hello);
    snprintf(text, sizeof text, "%.*s\n", (int)(length - sizeof *hello), name);
    write_text("/etc/hostname", text);
    snprintf(text, sizeof text, "%.*s\n", GENERATION, hello->generation);
    write_text("/etc/machine-id", text);
    write_text("/run/perilune/generation", text);
    if (processes != hello->processes) {
        snprintf(text, sizeof text, "%u", hello->processes);
        write_text(BOX "/pids.max", text);
        processes = hello->processes;
    }
    open_files = hello->open_files;
    limit_disk("/", hello->disk_bytes + image_bytes, &root);
    limit_disk("/dev/shm", hello->disk_bytes, &shared);
}

/* Processes stand still in a snapshot, so that none draws a number or reads the clock before its life has begun. */
void stop_processes(bool stop)
{
    write_text(BOX "/cgroup.freeze", stop ? "1" : "0");
    for (int tries = 0; stop && tries < STOP_TRIES && !read_number(BOX "/cgroup.events", "frozen "); tries++)
        usleep(500); /* One that waits in the kernel for good is taken as it is. */
}

void make_group(uint32_t id, char *path, size_t size)
{
    static uint32_t number;
    snprintf(path, size, BOX "/%u-%u", ++number, id);
    if (mkdir(path, 0755) < 0)
        path[0] = 0;
}
