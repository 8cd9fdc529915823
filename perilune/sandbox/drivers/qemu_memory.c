/* Loaded into QEMU before its own libraries: has the kernel note which pages of the guest's memory are written.
 *
 * A checkpoint then reads what changed since the one before instead of comparing all that ever changed. The memory is the one private
 * map of a file with PERILUNE_MEMORY_BYTES bytes. It is registered with userfaultfd for write tracking without faults that anybody
 * must answer (Linux 6.7); the owner asks for written pages with PAGEMAP_SCAN from outside, and sees there whether this has worked.
 *
 * With PERILUNE_MEMORY_MISSING the owner also fills the memory, page by page as it is touched; it takes the descriptor from this process
 * (pidfd_getfd). The descriptor stays open for the life of the process: closing it would end the tracking.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of headers that are newer than those of the oldest system that this is compiled on. */
#define ONLY_FAULTS_OF_PROGRAMS 1
#define UNPOPULATED_PAGES (1ull << 13)
#define WITHOUT_FAULTS (1ull << 15)

/* Where the owner finds the descriptor. */
#define PLACE 1000

static void track(void *start, size_t length)
{
    int missing = getenv("PERILUNE_MEMORY_MISSING") != NULL;
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && !missing) /* Tracking needs no faults; a page that the kernel itself waits for does. */
        fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | ONLY_FAULTS_OF_PROGRAMS);
    struct uffdio_api api = {.api = UFFD_API, .features = UNPOPULATED_PAGES | WITHOUT_FAULTS};
    struct uffdio_register map = {.range = {(uintptr_t)start, length}, .mode = UFFDIO_REGISTER_MODE_WP};
    if (missing)
        map.mode |= UFFDIO_REGISTER_MODE_MISSING;
    if (fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0 && ioctl(fd, UFFDIO_REGISTER, &map) == 0)
        dup3(fd, PLACE, O_CLOEXEC);
    if (fd >= 0)
        close(fd);
}

void *mmap64(void *start, size_t length, int protection, int flags, int fd, off64_t offset)
{
    void *mapped = (void *)syscall(SYS_mmap, start, length, protection, flags, fd, offset);
    const char *size = getenv("PERILUNE_MEMORY_BYTES");
    if (mapped != MAP_FAILED && size != NULL && (flags & MAP_PRIVATE) && fd >= 0 && offset == 0 && length == strtoull(size, NULL, 10))
        track(mapped, length);
    return mapped;
}

void *mmap(void *start, size_t length, int protection, int flags, int fd, off_t offset)
{
    return mmap64(start, length, protection, flags, fd, offset);
}
