/* A stand-in for the real libcufile: writes down each call in the file that RECORD names and answers by simple rules. */
#include <stddef.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <errno.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef struct { int err, cu_err; } Status;
typedef struct { int type; union { int fd; void *p; } handle; const void *ops; } Descr;
typedef struct { int mode; void *base; off_t offset, base_offset; size_t size; void *fh; int opcode; void *cookie; } Params;
typedef struct { void *cookie; int status; size_t ret; } Event;

static void note(const char *format, ...) {
  FILE *f = fopen(getenv("RECORD"), "a");
  va_list a;
  va_start(a, format);
  vfprintf(f, format, a);
  va_end(a);
  fputc('\n', f);
  fclose(f);
}
static int says(void) { const char *s = getenv("SAYS"); return s ? atoi(s) : 0; }
static int number(const char *name) { const char *s = getenv(name); return s ? atoi(s) : 0; }
static int error(void) { return number("ERRNO") ? number("ERRNO") : ENXIO; }
/* The code that a variable names, of calls that are refused. */
static Status refused(const char *name) { return (Status){number(name), number(name) == 5011 ? 719 : 0}; }
static const Status ok;
static int files, queued;
static Params waiting[64];

Status cuFileDriverClose_v2(void);
Status cuFileHandleRegister(void **h, Descr *d) {
  note("handle register fd=%d", d->handle.fd);
  if (says() == 5008) return (Status){5008, 0};
  if (d->handle.fd >= 0 && number("REFUSES_FILES")) return refused("REFUSES_FILES");
  *h = &files;
  return ok;
}
/* As the real one, whose end comes with the process: closes its driver, by a name that may lead elsewhere. */
static void ended(void) { note("end %d", cuFileDriverClose_v2().err); }
__attribute__((constructor)) static void begun(void) { atexit(ended); }
Status cuFileDriverOpen(void) {
  note("driver open");
  usleep(number("SLOW") * 1000);
  while (number("HANGS")) pause();
  /* As the real one: calls of its own that the loader leads to whoever has the name first. */
  void *h = 0;
  Descr d = {1, {-7}, 0};
  if (cuFileHandleRegister(&h, &d).err || h != &files) return (Status){5030, 0};
  return ok;
}
Status cuFileGetVersion(int *v) { *v = number("VERSION"); return ok; }
Status cuFileDriverClose_v2(void) { note("driver close"); return ok; }
void cuFileHandleDeregister(void *h) { note("handle deregister %d", h == &files); }
Status cuFileBufRegister(const void *p, size_t n, int flags) { (void)p; note("buf register %zu %d", n, flags); return ok; }
Status cuFileBufDeregister(const void *p) { (void)p; note("buf deregister"); return ok; }
ssize_t cuFileRead(void *h, void *p, size_t n, off_t at, off_t to) {
  note("read %d %d %zu %ld %ld", h == &files, p != 0, n, (long)at, (long)to);
  errno = error();
  return number("REFUSES") ? -number("REFUSES") : says() ? says() : 77;
}
ssize_t cuFileWrite(void *h, const void *p, size_t n, off_t at, off_t from) {
  note("write %d %d %zu %ld %ld", h == &files, p != 0, n, (long)at, (long)from);
  errno = error();
  return number("REFUSES") ? -number("REFUSES") : says() ? says() : (ssize_t)n;
}
ssize_t cuFileReadv(void *h, const void *all, size_t n, off_t at, unsigned flags) {
  note("readv %d %d %zu %ld %u", h == &files, all != 0, n, (long)at, flags);
  errno = error();
  return number("REFUSES") ? -number("REFUSES") : 77;
}
Status cuFileReadAsync(void *h, void *p, size_t *n, off_t *at, off_t *to, ssize_t *bytes, void *s) {
  (void)p, (void)at, (void)to, (void)s;
  note("read async %d %zu", h == &files, *n);
  if (number("REFUSES")) return refused("REFUSES");
  *bytes = 5;
  return ok;
}
Status cuFileSetParameterSizeT(int n, size_t v) { note("set size %d %zu", n, v); return ok; }
Status cuFileSetParameterBool(int n, _Bool v) { note("set bool %d %d", n, v); return ok; }
Status cuFileBatchIOSetUp(void **b, unsigned n) { note("batch setup %u", n); *b = waiting; return ok; }
Status cuFileBatchIOSubmit(void *b, unsigned n, Params *p, unsigned flags) {
  note("batch submit %d %u %u %d", b == waiting, n, flags, p->fh == &files);
  if (number("REFUSES")) return refused("REFUSES");
  for (unsigned i = 0; i < n; i++) waiting[queued++] = p[i];
  return ok;
}
Status cuFileBatchIOGetStatus(void *b, unsigned least, unsigned *n, Event *e, struct timespec *t) {
  (void)b, (void)t;
  if (getenv("NO_STATUS")) return (Status){5030, 0};
  unsigned told = 0;
  while (told < *n && queued > 0) { queued--; e[told++] = (Event){waiting[queued].cookie, says() < 0 ? 0x40 : 0x10, says() ? says() : 11}; }
  if (told) note("batch status %u", least);
  *n = told;
  return ok;
}
void cuFileBatchIODestroy(void *b) { note("batch destroy %d", b == waiting); }
