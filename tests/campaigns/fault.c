/* A file system that fails: writes or fsyncs of files whose path holds FAULT_PATH give the error whose number is in the
   file FAULT_FILE ("CALL RANK ERRNO", such as "pwrite 1 5"; no file: no fault). For LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int faulty(const char *call, int descriptor) {
    const char *fault = getenv("FAULT_FILE"), *part = getenv("FAULT_PATH"), *mine = getenv("OMPI_COMM_WORLD_RANK");
    char link[64], path[4096], wanted[16] = "", rank[16] = "";
    int number = 0;
    FILE *file;
    ssize_t length;
    if (!fault || !part || access(fault, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, part) || !(file = fopen(fault, "r"))) return 0;
    length = fscanf(file, "%15s %15s %d", wanted, rank, &number);
    fclose(file);
    if (length != 3 || strcmp(wanted, call) || strcmp(rank, mine ? mine : "0")) return 0;
    errno = number;
    return 1;
}

#define WRAP(type, name, call, parameters, arguments)                      \
    type name parameters {                                                 \
        if (faulty(call, descriptor)) return -1;                           \
        return ((type(*) parameters)dlsym(RTLD_NEXT, #name))arguments;     \
    }

WRAP(ssize_t, write, "write", (int descriptor, const void *b, size_t n), (descriptor, b, n))
WRAP(ssize_t, pwrite, "pwrite", (int descriptor, const void *b, size_t n, off_t o), (descriptor, b, n, o))
WRAP(ssize_t, pwrite64, "pwrite", (int descriptor, const void *b, size_t n, off64_t o), (descriptor, b, n, o))
WRAP(ssize_t, pwritev, "pwrite", (int descriptor, const struct iovec *v, int c, off_t o), (descriptor, v, c, o))
WRAP(ssize_t, pwritev64, "pwrite", (int descriptor, const struct iovec *v, int c, off64_t o), (descriptor, v, c, o))
WRAP(int, fsync, "fsync", (int descriptor), (descriptor))
