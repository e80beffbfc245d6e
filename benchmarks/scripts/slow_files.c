/* Shows a directory read-only, as a shared file system does: each open takes a while.

   slow_files DIRECTORY MOUNT MILLISECONDS [QUEUE]

   Opens of all processes with the same file QUEUE wait for each other, as at one metadata server.
   MOUNT/.counters has the number of files opened, of bytes read and of names looked up. Like a
   client of NFS, the kernel keeps names for three seconds and the content of files that have not
   changed.
   cc -O2 slow_files.c -o slow_files $(pkg-config --cflags --libs fuse3) */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *root, *queue, *counters = "/.counters";
static long delay; /* nanoseconds */
static atomic_long opened, bytes, names;

static const char *at(const char *path, char *buffer)
{
    snprintf(buffer, PATH_MAX, "%s%s", root, path);
    return buffer;
}

static int get_attributes(const char *path, struct stat *status, struct fuse_file_info *info)
{
    char full[PATH_MAX];
    (void)info;
    if (strcmp(path, counters) == 0) {
        memset(status, 0, sizeof *status);
        status->st_mode = S_IFREG | 0444;
        status->st_nlink = 1;
        return 0;
    }
    names++;
    return lstat(at(path, full), status) ? -errno : 0;
}

static int read_link(const char *path, char *target, size_t size)
{
    char full[PATH_MAX];
    ssize_t length = readlink(at(path, full), target, size - 1);
    if (length < 0)
        return -errno;
    target[length] = 0;
    return 0;
}

static int read_directory(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset,
                          struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    char full[PATH_MAX];
    DIR *directory = opendir(at(path, full));
    struct dirent *entry;
    (void)offset, (void)info, (void)flags;
    if (directory == NULL)
        return -errno;
    while ((entry = readdir(directory)) != NULL) {
        struct stat status = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
        fill(buffer, entry->d_name, &status, 0, 0);
    }
    closedir(directory);
    return 0;
}

static void wait_for_server(void)
{
    struct timespec pause = {delay / 1000000000, delay % 1000000000};
    int turn = queue ? open(queue, O_RDONLY) : -1;
    if (turn >= 0)
        flock(turn, LOCK_EX);
    nanosleep(&pause, NULL);
    if (turn >= 0)
        close(turn);
}

static int open_file(const char *path, struct fuse_file_info *info)
{
    char full[PATH_MAX];
    if (strcmp(path, counters) == 0) {
        info->direct_io = 1;
        return 0;
    }
    opened++;
    wait_for_server();
    int file = open(at(path, full), info->flags & ~O_NOFOLLOW);
    info->fh = file;
    return file < 0 ? -errno : 0;
}

static int read_file(const char *path, char *buffer, size_t size, off_t offset,
                     struct fuse_file_info *info)
{
    if (strcmp(path, counters) == 0) {
        char text[100];
        int length = snprintf(text, sizeof text, "%ld %ld %ld\n", opened, bytes, names);
        if (offset >= length)
            return 0;
        length -= offset;
        length = length < (int)size ? length : (int)size;
        memcpy(buffer, text + offset, length);
        return length;
    }
    ssize_t length = pread(info->fh, buffer, size, offset);
    if (length < 0)
        return -errno;
    bytes += length;
    return length;
}

static int close_file(const char *path, struct fuse_file_info *info)
{
    if (strcmp(path, counters) != 0)
        close(info->fh);
    return 0;
}

static int get_space(const char *path, struct statvfs *status)
{
    char full[PATH_MAX];
    return statvfs(at(path, full), status) ? -errno : 0;
}

static void *start(struct fuse_conn_info *connection, struct fuse_config *config)
{
    (void)connection;
    config->use_ino = 1; /* as on any host */
    config->auto_cache = 1;
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 3;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = start,
    .getattr = get_attributes,
    .readlink = read_link,
    .readdir = read_directory,
    .open = open_file,
    .read = read_file,
    .release = close_file,
    .statfs = get_space,
};

int main(int count, char **words)
{
    if (count != 4 && count != 5)
        return 2;
    root = words[1];
    delay = atof(words[3]) * 1e6;
    queue = words[4]; /* NULL if there is none */
    char *arguments[] = {words[0], "-f", "-o", "ro", words[2], NULL};
    return fuse_main(5, arguments, &operations, NULL);
}
