/* A stand-in for libcuda.so.1, for tests on machines without a GPU: the functions that src/cuda/table.rs names, on host memory
 * (and some that only other programs call: PyTorch, cluster-tests/gpu/local.py).
 * Copies are made when somebody waits for them. Its speed means nothing, and it shows nothing about a real driver.
 *
 * Made with: -DDEVICES=n (2), -DINIT=code (0), -DHANGS (cuInit never returns), -DCRASHES, -DNO_DMA_BUF, -DWITHOUT_EVENTS (old library),
 * -DUNORDERED (writes of others must be flushed), -DWITHOUT_EXPORT (a driver that knows no dma-buf),
 * -DNO_PCI (it does not say where a device is).
 * strake_standin_set(what, n): 1 = destroy the context after n copies, 2 = copies fail with code n, 3 = registering fails with code n,
 * 4 = allocations have no context from here on, as mappings have none, 5 = allocations belong to device n, 6 = the copy to or from the device after
 * n others changes a bit, 7 = modules are refused with code n, 8 = the kernel says wrong sums, 9 = waiting for a stream of the program or the
 * default one fails with code n, 11 = no allocation succeeds until it is set to 0, 12 = after n copies of pinned memory no other is taken, 13 = a copy
 * of memory that is not pinned takes n microseconds more.
 * Work in a stream, that of the program and of the default stream (NULL) too, is done when somebody waits for it and not before.
 * Of kernels it knows one by its name and plays it: what the text does is not looked at. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <pthread.h>

#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef INIT
#define INIT 0
#endif

#define ALLOCS 256
#define PINS 256
#define QUEUE 1024
#define AWAY (1ull << 60) /* no address of the process */

typedef struct { uint64_t start, size; void *context; int device, live; } Alloc;
typedef struct { void *host; uint64_t device; size_t len; int to_device; uint32_t block; uint64_t sums; void (*call)(void *); } Copy; /* block: a kernel that sums; call: a function, of host */
typedef struct { Copy copies[QUEUE]; unsigned long given, done; int failed, ours; } Stream; /* ours: of the bridge, which has events */
typedef struct { Stream *stream; unsigned long at; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int context_of[64];
static Alloc allocs[ALLOCS];
static int settled, n_allocs, gone, fail_copies, fail_pins, without_context, other_device = -1;
static long gone_after = -1, damage_after = -1, pinned_for = -1, pageable_takes;
static Stream default_stream;
static int fail_waits, recording; /* a graph */
static int refuse_modules, wrong_sums, modules, sum_kernel;
static struct { char *start; size_t len; void *context; } pins[PINS];
static int n_pins, pinned_twice, pins_orphaned, retained[64], no_room;
static uint64_t counts[4]; /* loaded from pinned, from other memory; saved to pinned, to other memory */
static _Thread_local void *current[16];
static _Thread_local int depth;

void strake_standin_set(int what, long n) {
  pthread_mutex_lock(&lock);
  if (what == 1) gone_after = n;
  if (what == 2) fail_copies = n;
  if (what == 3) fail_pins = n;
  if (what == 4) without_context = 1;
  if (what == 5) other_device = n;
  if (what == 6) damage_after = n;
  if (what == 7) refuse_modules = n;
  if (what == 8) wrong_sums = n;
  if (what == 9) fail_waits = n;
  if (what == 10) recording = n;
  if (what == 11) no_room = n;
  if (what == 12) pinned_for = n;
  if (what == 13) pageable_takes = n;
  pthread_mutex_unlock(&lock);
}
uint64_t strake_standin_count(int which) { return counts[which]; }
int strake_standin_pins(void) { return n_pins; }
int strake_standin_twice(void) { return pinned_twice; } /* registered while a part was */
int strake_standin_orphans(void) { return pins_orphaned; } /* still registered when their context was let go */
int strake_standin_settled(void) { return settled; }
int strake_standin_depth(void) { return depth; }
int strake_standin_modules(void) { return modules; }
static int flushed;
int strake_standin_flushed(void) { return flushed; }

static int alive(void) { return gone ? 709 : 0; }
static Alloc *find(uint64_t p) {
  for (int i = 0; i < n_allocs; i++)
    if (allocs[i].live && p >= allocs[i].start && p < allocs[i].start + allocs[i].size) return &allocs[i];
  return 0;
}

int cuInit(unsigned flags) {
#ifdef HANGS
  for (;;) sleep(1);
#endif
#ifdef CRASHES
  abort();
#endif
  return flags ? 1 : INIT;
}
int cuDeviceGetCount(int *n) { *n = DEVICES; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return n < DEVICES ? 0 : 101; }
int cuDeviceGetName(char *name, int len, int d) { (void)d; strncpy(name, "Stand-in GPU", len); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  (void)d;
#ifdef NO_DMA_BUF
  *v = 0;
#else
  *v = a == 124 || a == 117;
#endif
#ifndef UNORDERED
  if (a == 118) *v = 100;
#endif
  return 0;
}
int cuDeviceGetUuid(char *uuid, int d) { memset(uuid, 0xa0 + d, 16); return 0; }
int cuCtxGetDevice(int *d) { if (!current[depth]) return 201; *d = (int *)current[depth] - context_of; return 0; }
int cuDeviceGetPCIBusId(char *id, int len, int d) {
#ifdef NO_PCI
  (void)id, (void)len, (void)d;
  return 101;
#else
  return len > 12 && snprintf(id, len, "0000:%02X:00.0", 0x3b + d) == 12 ? 0 : 1;
#endif
}
int cuDevicePrimaryCtxRetain(void **c, int d) {
  pthread_mutex_lock(&lock);
  retained[d]++;
  pthread_mutex_unlock(&lock);
  *c = &context_of[d];
  return 0;
}
/* With the last one the context is destroyed, and what was registered in it. */
int cuDevicePrimaryCtxRelease_v2(int d) {
  pthread_mutex_lock(&lock);
  int last = --retained[d] == 0;
  for (int i = 0; last && i < n_pins;)
    if (pins[i].context == &context_of[d]) { pins[i] = pins[--n_pins]; pins_orphaned++; } else i++;
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = retained[d] > 0; return 0; }
int cuCtxSetCurrent(void *c) { current[depth] = c; return alive(); }
int cuCtxPushCurrent_v2(void *c) { if (gone) return 709; current[++depth] = c; return 0; }
int cuCtxPopCurrent_v2(void **c) { if (!depth) return 201; *c = current[depth--]; return 0; }

int cuCtxSynchronize(void) { if (!current[depth]) return 201; settled++; return alive(); }

int cuPointerGetAttributes(unsigned n, const int *what, void *const *to, uint64_t p) {
  if (!current[depth]) return 201;
  pthread_mutex_lock(&lock);
  Alloc *a = find(p);
  for (unsigned i = 0; i < n; i++) switch (what[i]) {
    case 1: *(void **)to[i] = a ? a->context : 0; break;
    case 2: *(unsigned *)to[i] = a ? 2 : 0; break;
    case 9: *(int *)to[i] = a ? a->device : -2; break;
    case 11: *(uint64_t *)to[i] = a ? a->start : 0; break;
    case 12: *(size_t *)to[i] = a ? a->size : 0; break;
    default: pthread_mutex_unlock(&lock); return 1;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuMemAlloc_v2(uint64_t *p, size_t len) {
  if (!current[depth]) return 201;
  if (len > (1ull << 32) || no_room) return 2;
  pthread_mutex_lock(&lock);
  static uint64_t next; /* one behind the other, so that ranges could run into the next allocation */
  static char *memory;
  if (!memory) memory = malloc(1 << 28);
  if (next + len > 1 << 28 || n_allocs == ALLOCS) { pthread_mutex_unlock(&lock); return 2; }
  *p = (uint64_t)memory + next + AWAY;
  next += (len + 255) & ~255ull;
  int device = other_device < 0 ? 0 : other_device;
  for (int d = 0; other_device < 0 && d < 64; d++) if (current[depth] == &context_of[d]) device = d;
  allocs[n_allocs++] = (Alloc){*p, (len + 255) & ~255ull, without_context ? 0 : &context_of[device], device, 1};
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (!current[depth]) return 201;
  if (target != 0 || scope != 100) return 1;
  flushed++;
  return alive();
}
#ifndef WITHOUT_EXPORT
/* A file in memory with the range's place and length in it, in place of a dma-buf. */
int cuMemGetHandleForAddressRange(void *handle, uint64_t p, size_t len, int type, unsigned long long flags) {
  if (!current[depth]) return 201;
  if (type != 1 || flags || p % 4096 || len % 4096 || !len) return 1;
  uint64_t said[2] = {p, len};
  int fd = memfd_create("standin", 0);
  if (fd < 0 || write(fd, said, sizeof said) != sizeof said) return 999;
  *(int *)handle = fd;
  return alive();
}
#endif
int cuMemFree_v2(uint64_t p) {
  pthread_mutex_lock(&lock);
  Alloc *a = find(p);
  int ok = a && a->start == p;
  if (ok) a->live = 0;
  pthread_mutex_unlock(&lock);
  return ok ? 0 : 1;
}
int cuMemHostRegister_v2(void *p, size_t len, unsigned flags) {
  if (!current[depth]) return 201;
  pthread_mutex_lock(&lock);
  int code = fail_pins ? fail_pins : flags != 1 || n_pins == PINS ? 1 : alive();
  for (int i = 0; !code && i < n_pins; i++)
    if (pins[i].start < (char *)p + len && (char *)p < pins[i].start + pins[i].len) { code = 712; pinned_twice++; }
  if (!code) { pins[n_pins].start = p; pins[n_pins].context = current[depth]; pins[n_pins++].len = len; }
  pthread_mutex_unlock(&lock);
  return code;
}
int cuMemHostUnregister(void *p) {
  int code = 713;
  if (!current[depth]) return 201;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_pins; i++) if (pins[i].start == p) { pins[i] = pins[--n_pins]; code = 0; break; }
  pthread_mutex_unlock(&lock);
  return code;
}
int cuStreamCreate(void **s, unsigned flags) { if (flags != 1) return 1; if (gone) return 709; *s = calloc(1, sizeof(Stream)); return 0; }

static int is_pinned(char *host, size_t len) {
  for (int i = 0; i < n_pins; i++) if (host >= pins[i].start && host + len <= pins[i].start + pins[i].len) return 1;
  return 0;
}
static uint32_t crc32c(const unsigned char *p, size_t n) {
  uint32_t crc = ~0u;
  for (; n--; p++) {
    crc ^= *p;
    for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}
#define PIECES 32 /* words of a block; the sum is the exclusive or of all */
static void sum(Copy *c) {
  uint32_t *to = (uint32_t *)(c->sums - AWAY);
  for (size_t at = 0; at < c->len; at += c->block, to += PIECES) {
    to[0] = 0;
    for (int i = 1; i < PIECES; i++) to[0] ^= to[i] = i * 2654435761u;
    to[0] ^= crc32c((unsigned char *)(c->device - AWAY + at), c->len - at < c->block ? c->len - at : c->block) ^ wrong_sums;
  }
}
static int run(Stream *s, unsigned long before) {
  pthread_mutex_lock(&lock);
  for (; s->done < before; s->done++) {
    Copy *c = &s->copies[s->done % QUEUE];
    if (gone_after == 0) gone = 1;
    if (gone_after > 0) gone_after--;
    if (c->call) { if (!gone && !s->failed) c->call(c->host); continue; }
    Alloc *a = find(c->device);
    if (gone) s->failed = 709;
    else if (fail_copies) s->failed = fail_copies;
    else if (!a || c->device + c->len > a->start + a->size) s->failed = 700;
    if (s->failed) continue;
    if (c->block) { sum(c); continue; }
    if (pageable_takes && !is_pinned(c->host, c->len)) usleep(pageable_takes);
    if (c->to_device) memcpy((void *)(c->device - AWAY), c->host, c->len);
    else memcpy(c->host, (void *)(c->device - AWAY), c->len);
    if (damage_after >= 0 && damage_after-- == 0) ((char *)(c->to_device ? (void *)(c->device - AWAY) : c->host))[c->len / 2] ^= 1;
    counts[2 * !c->to_device + !is_pinned(c->host, c->len)] += c->len;
  }
  pthread_mutex_unlock(&lock);
  return s->failed;
}
static Stream *of(void *s) { return s ? s : &default_stream; }
static int add(void *stream, Copy c) {
  Stream *s = of(stream);
  if (gone) return 709;
  if (!c.call && !find(c.device)) return 1;
  pthread_mutex_lock(&lock);
  int counts_here = !c.call && !c.block && pinned_for >= 0 && is_pinned(c.host, c.len);
  int refused = counts_here && pinned_for == 0;
  if (counts_here && !refused) pinned_for--;
  pthread_mutex_unlock(&lock);
  if (refused) return 999;
  if (s->given - s->done == QUEUE) run(s, s->given);
  s->copies[s->given++ % QUEUE] = c;
  return 0;
}
int cuModuleLoadData(void **m, const void *text) {
  if (!current[depth]) return 201;
  if (refuse_modules) return refuse_modules;
  if (!strstr(text, ".version 6.") || !strstr(text, ".visible .entry strake_crc32c(")) return 218;
  *m = &modules;
  modules++;
  return 0;
}
int cuModuleUnload(void *m) { if (m != &modules || !modules) return 1; modules--; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) {
  if (m != &modules || strcmp(name, "strake_crc32c")) return 500;
  *f = &sum_kernel;
  return 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **p, void **extra) {
  if (f != &sum_kernel || gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra) return 1;
  Copy c = {.device = *(uint64_t *)p[0], .len = *(uint64_t *)p[1], .block = *(uint32_t *)p[2], .sums = *(uint64_t *)p[3]};
  if (!c.block || (uint64_t)gx * bx / PIECES * c.block < c.len) return 1; /* there are threads for each block */
  Alloc *a = find(c.sums);
  if (!a || c.sums + (c.len + c.block - 1) / c.block * 4 * PIECES > a->start + a->size) return 700;
  return add(s, c);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t len, void *s) { return add(s, (Copy){(void *)from, to, len, 1}); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t len, void *s) { return add(s, (Copy){to, from, len, 0}); }
static int now(Copy c) { int code = add(0, c); return code ? code : run(&default_stream, default_stream.given); }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t len) { return now((Copy){(void *)from, to, len, 1}); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t len) { return now((Copy){to, from, len, 0}); }
int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t len) {
  if (!find(to)) return 1;
  memset((void *)(to - AWAY), byte, len);
  return 0;
}
int cuLaunchHostFunc(void *s, void (*f)(void *), void *of_it) { return add(s, (Copy){.host = of_it, .call = f}); }
int cuStreamIsCapturing(void *s, int *status) {
  if (!s && !current[depth]) return 201;
  *status = of(s)->ours ? 0 : recording;
  return 0;
}
int cuStreamSynchronize(void *s) {
  if (recording && !of(s)->ours) abort(); /* the graph would be lost */
  if (!s && !current[depth]) return 201;
  if (fail_waits && !of(s)->ours) return fail_waits;
  return run(of(s), of(s)->given);
}
int cuStreamDestroy_v2(void *s) { run(s, ((Stream *)s)->given); free(s); return 0; }
#ifndef WITHOUT_EVENTS
int cuEventCreate(void **e, unsigned flags) { if (flags != 3) return 1; *e = calloc(1, sizeof(Event)); return 0; }
int cuEventDestroy_v2(void *e) { free(e); return 0; }
int cuEventRecord(void *e, void *s) { *(Event *)e = (Event){of(s), of(s)->given}; of(s)->ours = 1; return 0; }
int cuEventSynchronize(void *e) { return run(((Event *)e)->stream, ((Event *)e)->at); }
#endif
int cuGetErrorName(int code, const char **name) {
  *name = code == 3 ? "CUDA_ERROR_NOT_INITIALIZED" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 304 ? "CUDA_ERROR_OPERATING_SYSTEM" : 0;
  return *name ? 0 : 1;
}
