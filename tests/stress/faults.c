// A fault layer between a process and the C library, loaded with LD_PRELOAD: it fails, tears, or kills at a chosen call
// on files below one folder, lets every lock succeed, and moves the wall clock. Calls on other files pass untouched.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, LIST, STAT, TOUCH, OPERATIONS };
enum { NOTHING, FAIL_ONCE, FAIL_ON, KILL };
enum { WATCHED = 1, UNSYNCED = 2, LARGEST_DESCRIPTOR = 4096 };

static char root[PATH_MAX];
static unsigned watched_operations, random_state;
static long calls_left, calls_seen;
static int action, failure, lying_sync, lying_locks;
static double clock_offset_s;
static unsigned char descriptors[LARGEST_DESCRIPTOR];

#define REAL(result, name, ...)                                            \
    static result (*real)(__VA_ARGS__);                                    \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

// ---- what Python calls

void faults_arm(const char *folder, unsigned operations, long after, int what, int error, unsigned seed, int lie) {
    strncpy(root, folder, sizeof root - 1);
    watched_operations = operations;
    calls_left = after;
    calls_seen = 0;
    action = what;
    failure = error;
    random_state = seed * 2654435761u + 1;
    lying_sync = lie;
}

void faults_disarm(void) { action = NOTHING; root[0] = 0; lying_sync = 0; }

long faults_seen(void) { return calls_seen; }

void faults_set_clock(double offset_s) { clock_offset_s = offset_s; }

void faults_let_locks_lie(int lie) { lying_locks = lie; }

// ---- the decision at each call

static unsigned draw(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    return random_state ^= random_state << 5;
}

static int is_below_root(const char *path) { return root[0] && path && !strncmp(path, root, strlen(root)); }

static int is_watched(int descriptor) {
    return root[0] && descriptor >= 0 && descriptor < LARGEST_DESCRIPTOR && (descriptors[descriptor] & WATCHED);
}

// What a loss of power leaves of data that was not synced: some beginning of it.
static void lose_what_is_not_synced(void) {
    for (int descriptor = 0; descriptor < LARGEST_DESCRIPTOR; descriptor++) {
        struct stat status;
        if ((descriptors[descriptor] & UNSYNCED) && !fstat(descriptor, &status) && status.st_size)
            if (ftruncate(descriptor, draw() % (status.st_size + 1))) continue;
    }
}

// True where the call must fail; errno is set. Does not return where the process is to die here.
static int strikes(int operation) {
    if (action == NOTHING || !(watched_operations >> operation & 1)) return 0;
    long left = calls_left - calls_seen++;
    if (left > 0 || (left < 0 && action != FAIL_ON)) return 0;
    if (action == KILL) {
        action = NOTHING;
        lose_what_is_not_synced();
        kill(getpid(), SIGKILL);
    }
    errno = failure;
    return 1;
}

// ---- files

static int opened(int descriptor, const char *path) {
    if (descriptor >= 0 && descriptor < LARGEST_DESCRIPTOR) descriptors[descriptor] = is_below_root(path) ? WATCHED : 0;
    return descriptor;
}

#define DEFINE_OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                           \
        REAL(int, #name, const char *, int, ...);                          \
        va_list rest;                                                      \
        va_start(rest, flags);                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                      \
        if (is_below_root(path) && strikes(OPEN)) return -1;               \
        return opened(real(path, flags, mode), path);                      \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

// A file that is closed and was never synced stays at risk: a second descriptor is kept, by which it can be torn.
int close(int descriptor) {
    REAL(int, "close", int);
    if (descriptor >= 0 && descriptor < LARGEST_DESCRIPTOR) {
        int kept = descriptors[descriptor] & UNSYNCED ? fcntl(descriptor, F_DUPFD_CLOEXEC, 100) : -1;
        if (kept >= 0 && kept < LARGEST_DESCRIPTOR) descriptors[kept] = UNSYNCED;
        descriptors[descriptor] = 0;
    }
    return real(descriptor);
}

ssize_t read(int descriptor, void *buffer, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    if (is_watched(descriptor) && strikes(READ)) return -1;
    return real(descriptor, buffer, size);
}

// Large writes come in pieces, as they may from any kernel, so that a death can fall between two of them.
ssize_t write(int descriptor, const void *buffer, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (!is_watched(descriptor)) return real(descriptor, buffer, size);
    if (strikes(WRITE)) return -1;
    descriptors[descriptor] |= UNSYNCED;
    return real(descriptor, buffer, size > 4096 ? size / 2 : size);
}

#define DEFINE_SYNC(name)                                                  \
    int name(int descriptor) {                                             \
        REAL(int, #name, int);                                             \
        if (!is_watched(descriptor)) return real(descriptor);              \
        if (strikes(FSYNC)) return -1;                                     \
        if (!lying_sync) descriptors[descriptor] &= ~UNSYNCED;             \
        return 0;                                                          \
    }
DEFINE_SYNC(fsync)
DEFINE_SYNC(fdatasync)

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return is_below_root(to) && strikes(RENAME) ? -1 : real(from, to);
}

#define DEFINE_PATH_CALL(name, operation)                                  \
    int name(const char *path) {                                           \
        REAL(int, #name, const char *);                                    \
        return is_below_root(path) && strikes(operation) ? -1 : real(path); \
    }
DEFINE_PATH_CALL(unlink, UNLINK)
DEFINE_PATH_CALL(rmdir, RMDIR)

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return is_below_root(path) && strikes(MKDIR) ? -1 : real(path, mode);
}

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    return is_below_root(path) && strikes(LIST) ? NULL : real(path);
}

#define DEFINE_STAT(name, type)                                            \
    int name(const char *path, struct type *status) {                      \
        REAL(int, #name, const char *, struct type *);                     \
        return is_below_root(path) && strikes(STAT) ? -1 : real(path, status); \
    }
DEFINE_STAT(stat, stat)
DEFINE_STAT(stat64, stat64)
DEFINE_STAT(lstat, stat)
DEFINE_STAT(lstat64, stat64)

#define DEFINE_FSTAT(name, type)                                           \
    int name(int descriptor, struct type *status) {                        \
        REAL(int, #name, int, struct type *);                              \
        return is_watched(descriptor) && strikes(STAT) ? -1 : real(descriptor, status); \
    }
DEFINE_FSTAT(fstat64, stat64)

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(int, "utimensat", int, const char *, const struct timespec *, int);
    return is_below_root(path) && strikes(TOUCH) ? -1 : real(folder, path, times, flags);
}

// ---- locks of a file system that grants every one, and the clock

int flock(int descriptor, int operation) {
    REAL(int, "flock", int, int);
    return lying_locks ? 0 : real(descriptor, operation);
}

#define DEFINE_FCNTL(name)                                                 \
    int name(int descriptor, int command, ...) {                           \
        REAL(int, #name, int, int, ...);                                   \
        va_list rest;                                                      \
        va_start(rest, command);                                           \
        void *argument = va_arg(rest, void *);                             \
        va_end(rest);                                                      \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW; \
        return lying_locks && locks ? 0 : real(descriptor, command, argument); \
    }
DEFINE_FCNTL(fcntl)
DEFINE_FCNTL(fcntl64)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += (time_t)clock_offset_s;
    return result;
}
