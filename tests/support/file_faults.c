/* Loaded under the C library (LD_PRELOAD): counts what a process does to files below one folder, and at one of these operations
   ends the process, or lets that operation fail, or it and all that follow. file_faults.py says which. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct orders {
    char folder[PATH_MAX];
    long at;          /* the operation that is hit; 0: none */
    int signal;       /* what ends the process, or 0 */
    int error;        /* with what the operation fails */
    int for_good;     /* whether all later ones fail too */
    int changes_only; /* count only what changes files or folders, not what reads them */
    _Atomic long count;
};
static struct orders *orders;

void obey(struct orders *given) { orders = given; }

static int is_below(const char *path) {
    size_t length = strlen(orders->folder);
    return strncmp(path, orders->folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* The path behind a descriptor. */
static int name_of(int descriptor, char *name, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, name, size - 1);
    if (length < 0) return 0;
    name[length] = 0;
    return 1;
}

/* Whether the operation that is about to happen is to fail. */
static int is_hit(int changes) {
    int before = errno;
    if (orders->changes_only && !changes) return 0;
    long now = atomic_fetch_add(&orders->count, 1) + 1;
    if (!orders->at || now < orders->at || (now > orders->at && !orders->for_good)) return 0;
    if (orders->signal) {
        if (now == orders->at) kill(getpid(), orders->signal);
        errno = before;
        return 0;
    }
    errno = orders->error;
    return 1;
}

static int hits_path(int folder, const char *path, int changes) {
    char full[2 * PATH_MAX] = "";
    if (!orders || !path) return 0;
    int before = errno;
    if (path[0] != '/') {
        if (folder == AT_FDCWD ? !getcwd(full, PATH_MAX) : !name_of(folder, full, PATH_MAX)) return 0;
        strcat(full, "/");
    }
    strncat(full, path, PATH_MAX);
    errno = before;
    return is_below(full) && is_hit(changes);
}

static int hits_file(int descriptor, int changes) {
    char name[PATH_MAX];
    if (!orders) return 0;
    int before = errno;
    int ours = name_of(descriptor, name, sizeof name) && is_below(name);
    errno = before;
    return ours && is_hit(changes);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name, declared, given, folder)                                                   \
    int name declared {                                                                        \
        va_list more;                                                                          \
        va_start(more, flags);                                                                 \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;                      \
        va_end(more);                                                                          \
        if (hits_path(folder, path, (flags & (O_ACCMODE | O_CREAT | O_TRUNC)) != 0)) return -1; \
        return REAL(name) given;                                                               \
    }
OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), folder)
OPENS(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), folder)

#define ON_PATH(name, declared, given, folder, path) \
    int name declared { return hits_path(folder, path, 1) ? -1 : REAL(name) given; }
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
ON_PATH(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), folder, path)
ON_PATH(rmdir, (const char *path), (path), AT_FDCWD, path)
ON_PATH(unlink, (const char *path), (path), AT_FDCWD, path)
ON_PATH(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), folder, path)
ON_PATH(rename, (const char *old, const char *path), (old, path), AT_FDCWD, path)
ON_PATH(renameat, (int from, const char *old, int folder, const char *path), (from, old, folder, path), folder, path)
ON_PATH(renameat2, (int from, const char *old, int folder, const char *path, unsigned flags), (from, old, folder, path, flags),
        folder, path)
ON_PATH(link, (const char *old, const char *path), (old, path), AT_FDCWD, path)
ON_PATH(symlink, (const char *old, const char *path), (old, path), AT_FDCWD, path)
ON_PATH(truncate, (const char *path, off_t size), (path, size), AT_FDCWD, path)
ON_PATH(truncate64, (const char *path, off64_t size), (path, size), AT_FDCWD, path)

#define ON_FILE(result, name, declared, given, changes) \
    result name declared { return hits_file(file, changes) ? -1 : REAL(name) given; }
ON_FILE(ssize_t, write, (int file, const void *data, size_t size), (file, data, size), 1)
ON_FILE(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), 1)
ON_FILE(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), 1)
ON_FILE(ssize_t, writev, (int file, const struct iovec *data, int count), (file, data, count), 1)
ON_FILE(ssize_t, sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size), 1)
ON_FILE(ssize_t, sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size), 1)
ON_FILE(int, ftruncate, (int file, off_t size), (file, size), 1)
ON_FILE(int, ftruncate64, (int file, off64_t size), (file, size), 1)
ON_FILE(int, fsync, (int file), (file), 0)
ON_FILE(int, fdatasync, (int file), (file), 0)
ON_FILE(ssize_t, read, (int file, void *data, size_t size), (file, data, size), 0)
ON_FILE(ssize_t, pread, (int file, void *data, size_t size, off_t at), (file, data, size, at), 0)
ON_FILE(ssize_t, pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at), 0)

ssize_t copy_file_range(int from, off64_t *start, int file, off64_t *at, size_t size, unsigned flags) {
    return hits_file(file, 1) ? -1 : REAL(copy_file_range)(from, start, file, at, size, flags);
}

DIR *opendir(const char *path) { return hits_path(AT_FDCWD, path, 0) ? NULL : REAL(opendir)(path); }

/* A file is closed even if that fails. */
int close(int file) {
    int hit = hits_file(file, 0), error = errno;
    int result = REAL(close)(file);
    if (hit) errno = error;
    return hit ? -1 : result;
}
