/* Loaded before a program: gives it a /proc/modules, which kernels without modules lack (the real libcufile hangs there), and lies as a hostile
 * file system in user space would, if FORGE says how: ino, uuid, version, garbage, or the number of an error, which
 * with ONCE comes only the first time. SECURE: as if the program had more rights than who started it. MOUNTINFO: what is read for /proc/self/mountinfo. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static const char *other(const char *path) {
  const char *modules = getenv("MODULES"), *mounts = getenv("MOUNTINFO");
  if (path && modules && !strcmp(path, "/proc/modules")) return modules;
  if (path && mounts && !strcmp(path, "/proc/self/mountinfo")) return mounts;
  return path;
}
static int (*next(const char *name))(const char *, int, ...) { return (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name); }
#define OPEN(name) int name(const char *path, int flags, ...) { \
  va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); return next(#name)(other(path), flags, mode); }
OPEN(open)
OPEN(open64)
FILE *fopen(const char *path, const char *mode) { return ((FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen"))(other(path), mode); }
FILE *fopen64(const char *path, const char *mode) { return ((FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen64"))(other(path), mode); }

unsigned long getauxval(unsigned long type) {
  return type == 23 /* AT_SECURE */ && getenv("SECURE") ? 1 : ((unsigned long (*)(unsigned long))dlsym(RTLD_NEXT, "getauxval"))(type);
}
int ioctl(int fd, unsigned long number, ...) {
  va_list a;
  va_start(a, number);
  unsigned char *p = va_arg(a, unsigned char *);
  va_end(a);
  int code = ((int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl"))(fd, number, p);
  const char *forge = getenv("FORGE");
  if (!forge || (number & 0xffffffff) != 0x8040e701) return code;
  static int asked;
  if (atoi(forge)) {
    if (getenv("ONCE") && asked++) return code;
    errno = atoi(forge);
    return -1;
  }
  if (!strcmp(forge, "ino")) p[32] ^= 1;
  if (!strcmp(forge, "uuid")) p[16] ^= 1;
  if (!strcmp(forge, "version")) p[8] = 9;
  if (!strcmp(forge, "garbage")) memset(p, 0x5a, 64);
  return 7; /* success, whatever the number */
}
