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

// A path that starts at an open folder.
static int is_below_root_at(int folder, const char *path) {
    return folder == AT_FDCWD || (path && *path == '/') ? is_below_root(path) : is_watched(folder);
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

// Paths that start at the process's folder and those that start at an open one go through the same calls here.

static int opened(int descriptor, int below) {
    if (descriptor >= 0 && descriptor < LARGEST_DESCRIPTOR) descriptors[descriptor] = below ? WATCHED : 0;
    return descriptor;
}

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    REAL(int, "openat", int, const char *, int, ...);
    int below = is_below_root_at(folder, path);
    return below && strikes(OPEN) ? -1 : opened(real(folder, path, flags, mode), below);
}

#define OPEN_AT(folder)                                                    \
    va_list rest;                                                          \
    va_start(rest, flags);                                                 \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                          \
    return open_at(folder, path, flags, mode)

int open(const char *path, int flags, ...) { OPEN_AT(AT_FDCWD); }
int open64(const char *path, int flags, ...) { OPEN_AT(AT_FDCWD); }
int openat(int folder, const char *path, int flags, ...) { OPEN_AT(folder); }
int openat64(int folder, const char *path, int flags, ...) { OPEN_AT(folder); }

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

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    return is_below_root_at(to_folder, to) && strikes(RENAME) ? -1 : real(from_folder, from, to_folder, to);
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    int operation = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    return is_below_root_at(folder, path) && strikes(operation) ? -1 : real(folder, path, flags);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    return is_below_root_at(folder, path) && strikes(MKDIR) ? -1 : real(folder, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    return is_below_root(path) && strikes(LIST) ? NULL : real(path);
}

DIR *fdopendir(int descriptor) {
    REAL(DIR *, "fdopendir", int);
    return is_watched(descriptor) && strikes(LIST) ? NULL : real(descriptor);
}

static int stat_at(int folder, const char *path, void *status, int flags) {
    REAL(int, "fstatat", int, const char *, void *, int);
    return is_below_root_at(folder, path) && strikes(STAT) ? -1 : real(folder, path, status, flags);
}

int stat(const char *path, struct stat *status) { return stat_at(AT_FDCWD, path, status, 0); }
int stat64(const char *path, struct stat64 *status) { return stat_at(AT_FDCWD, path, status, 0); }
int lstat(const char *path, struct stat *status) { return stat_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
int lstat64(const char *path, struct stat64 *status) { return stat_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
int fstatat(int folder, const char *path, struct stat *status, int flags) {
    return stat_at(folder, path, status, flags);
}
int fstatat64(int folder, const char *path, struct stat64 *status, int flags) {
    return stat_at(folder, path, status, flags);
}

int fstat64(int descriptor, struct stat64 *status) {
    REAL(int, "fstat64", int, struct stat64 *);
    return is_watched(descriptor) && strikes(STAT) ? -1 : real(descriptor, status);
}

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(int, "utimensat", int, const char *, const struct timespec *, int);
    return is_below_root_at(folder, path) && strikes(TOUCH) ? -1 : real(folder, path, times, flags);
}

// ---- locks of a file system that grants every one, copies of descriptors, and the clock

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
        if (lying_locks && locks) return 0;                                \
        int result = real(descriptor, command, argument);                  \
        if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) opened(result, is_watched(descriptor)); \
        return result;                                                     \
    }
DEFINE_FCNTL(fcntl)
DEFINE_FCNTL(fcntl64)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += (time_t)clock_offset_s;
    return result;
}
