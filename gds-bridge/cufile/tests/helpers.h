/* What the tries of program.c have in common, which includes this once. */
#define CHECK(what) do { if (!(what)) { \
  fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno); exit(1); } } while (0)
#define IS(what, want) do { long got_ = (long)(what), want_ = (long)(want); if (got_ != want_) { \
  fprintf(stderr, "line %d: %s is %ld, not %ld (errno %d)\n", __LINE__, #what, got_, want_, errno); exit(1); } } while (0)
#define FAILS(what, number) do { errno = 0; IS(what, -1); IS(errno, number); } while (0)

#define LEN 1000003
#define MIB (1 << 20)

static const char *ours, *elsewhere;
static char path[4096];
static char *name(const char *dir, const char *file) { snprintf(path, sizeof path, "%s/%s", dir, file); return path; }
static char *pattern(int seed, size_t n) {
  char *p = malloc(n);
  for (size_t i = 0; i < n; i++) p[i] = (char)((i + seed * 977) * 2654435761u >> 13);
  return p;
}
static void *device(size_t n) { uint64_t p; IS(cuMemAlloc_v2(&p, n), 0); return (void *)p; }
static void put(void *to, const void *from, size_t n) { IS(cuMemcpyHtoDAsync_v2((uint64_t)to, from, n, 0), 0); IS(cuStreamSynchronize(0), 0); }
static char *get(void *from, size_t n) {
  char *p = malloc(n);
  IS(cuMemcpyDtoHAsync_v2(p, (uint64_t)from, n, 0), 0);
  IS(cuStreamSynchronize(0), 0);
  return p;
}
static int same(void *gpu, const void *want, size_t n) { char *p = get(gpu, n); int r = memcmp(p, want, n); free(p); return !r; }
static int try_register(int fd, void **h) { Descr d = {.type = 1, .handle.fd = fd}; return cuFileHandleRegister(h, &d).err; }
static void *registered(int fd) { void *h; IS(try_register(fd, &h), 0); CHECK(h); return h; }
static int made(const char *dir, const char *file, int flags) { int fd = open(name(dir, file), flags | O_CREAT, 0644); CHECK(fd >= 0); return fd; }
static void *use_device(int n) { void *c; IS(cuInit(0), 0); IS(cuDevicePrimaryCtxRetain(&c, n), 0); IS(cuCtxSetCurrent(c), 0); return c; }
