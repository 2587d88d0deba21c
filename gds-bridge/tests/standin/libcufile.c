/* A stand-in for NVIDIA's libcufile, in memory of libcuda.c beside it: host memory. Counts as the real one, of version VERSION (1200 unless defined).
 * COMPAT: reads in its compatibility mode, into memory that has libcuda.c's addresses. STALE: its compatibility mode cannot be switched off. NO_DRIVER: the driver does not open. NO_STATS: as before 1.15. OURS: as our own library. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 1200
#endif
typedef struct { int err, cu_err; } Status;
typedef struct { int type; union { int fd; void *p; } handle; const void *ops; } Descr;
typedef struct { char uuid[16]; uint64_t read_bytes, bw, util, us, reads, p2p, nvfs, posix, rest[21]; } Gpu;
typedef struct { uint64_t level1[VERSION >= 1160 ? 78 : 64], sizes[64]; uint32_t gpus; Gpu gpu[16]; } Stats;
_Static_assert(sizeof(Gpu) == 248 && sizeof(Stats) == (VERSION >= 1160 ? 5112 : 5000), "as in the interface");

static const Status ok;
static Stats stats;
static int compat = 1, level, open_, counting, registered, trick;
/* 0: reads straight. 1: by way of host memory. 2: a code as if it were bytes. 3: -1 and EIO. 4: counts nothing. */
void strake_standin_trick(int n) { trick = n; }
int strake_standin_registered(void) { return registered; }
#ifdef OURS
int strake_cufile = 1;
#endif
Status cuFileGetVersion(int *v) { *v = VERSION; return ok; }
Status cuFileSetParameterBool(int n, _Bool v) {
#ifdef STALE
  return (Status){5026, 0};
#endif
  if (n != 1 || open_) return (Status){5022, 0};
  compat = v;
  return ok;
}
Status cuFileDriverOpen(void) {
#ifdef NO_DRIVER
  return (Status){5011, 999};
#endif
#ifndef COMPAT
  if (compat) return (Status){5030, 0};
#endif
  open_ = 1;
  return ok;
}
#ifndef NO_STATS
Status cuFileSetStatsLevel(int n) { level = n; return ok; }
Status cuFileStatsStart(void) { counting = open_ && level == 3; return counting ? ok : (Status){5001, 0}; }
Status cuFileGetStatsL3(Stats *to) {
  if (!counting) return (Status){5022, 0};
  stats.gpus = 2;
  memcpy(to, &stats, sizeof stats);
  return ok;
}
#endif
Status cuFileHandleRegister(void **h, Descr *d) {
  if (!open_ || d->type != 1 || d->ops || lseek(d->handle.fd, 0, SEEK_END) < 0) return (Status){5027, 0};
  int *fd = malloc(sizeof *fd);
  *fd = d->handle.fd;
  registered++;
  *h = fd;
  return ok;
}
void cuFileHandleDeregister(void *h) { free(h); registered--; }
ssize_t cuFileRead(void *h, void *p, size_t n, off_t at, off_t to) {
  if (trick == 2) return 5006;
  if (trick == 3) { errno = EIO; return -1; }
#ifdef COMPAT
  p = (void *)((uint64_t)p - (1ull << 60));
#endif
  void *b = 0; /* the descriptor may be of direct I/O */
  if (posix_memalign(&b, 4096, (n + 4095) / 4096 * 4096)) return -5030;
  ssize_t got = pread(*(int *)h, b, n, at);
  if (got > 0) memcpy((char *)p + to, b, got);
  free(b);
  if (got > 0 && trick != 4) {
    Gpu *g = &stats.gpu[1];
    g->reads++, g->read_bytes += got;
    *(trick == 1 ? &g->posix : &g->nvfs) += 1;
  }
  return got;
}
