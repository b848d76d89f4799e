// A disk that fails: preloaded, it makes chosen calls that change files below one folder fail with an error of choice.
// SQLite and Python call these through the C library, so both meet it. See bad_disk.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static long first = 0, last = 0, seen = 0;
static int error_number = 0;  // 0: half of a write is taken

void bad_disk_arm(const char *path, long from, long count, int error) {
    seen = 0;
    first = from;
    last = from + count;
    error_number = error;
    snprintf(folder, sizeof folder, "%s", path);
}

long bad_disk_seen(void) { return seen; }

static int below(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static int open_below(int fd) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}

static int fails(int concerned) {
    if (!concerned) return 0;
    long number = __sync_fetch_and_add(&seen, 1);
    if (number < first || number >= last) return 0;
    errno = error_number ? error_number : EIO;
    return 1;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, #name)

#define WRITE(name, extra, passed, ...) \
    ssize_t name(int fd, const void *data, size_t size __VA_ARGS__) { \
        REAL(ssize_t, name, int, const void *, size_t __VA_ARGS__); \
        if (!fails(open_below(fd))) return real(fd, data, size passed); \
        return error_number ? -1 : real(fd, data, size / 2 passed); \
    }
#define NOTHING
#define OFFSET , offset
WRITE(write, , NOTHING)
WRITE(pwrite, , OFFSET, , off_t offset)
WRITE(pwrite64, , OFFSET, , off64_t offset)

#define ON_FD(name, passed, ...) \
    int name(int fd __VA_ARGS__) { \
        REAL(int, name, int __VA_ARGS__); \
        return fails(open_below(fd)) ? -1 : real(fd passed); \
    }
#define LENGTH , length
ON_FD(fsync, NOTHING)
ON_FD(fdatasync, NOTHING)
ON_FD(ftruncate, LENGTH, , off_t length)
ON_FD(ftruncate64, LENGTH, , off64_t length)

int unlink(const char *path) {
    REAL(int, unlink, const char *);
    return fails(below(path)) ? -1 : real(path);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return (flags & O_CREAT) && fails(below(path)) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
