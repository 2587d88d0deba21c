/* The stand-in of the driver with what KvikIO (26.10) looks up besides: it asks for all of these names at once, and calls the first four.
 * Made and used by a_command_that_is_named_by_who_runs_the_tests with STRAKE_CUFILE_TRY=
 * 'mkdir k && cc -shared -fPIC -pthread -o k/libcuda.so.1 .../kvikio.c && LD_LIBRARY_PATH=$PWD/k python3 .../kvikio_roundtrip.py' */
#include "../../tests/standin/libcuda.c"
int cuPointerGetAttribute(void *to, int what, uint64_t p) { return cuPointerGetAttributes(1, &what, &to, p); }
int cuDriverGetVersion(int *v) { *v = 12000; return 0; } /* a failure here deadlocks KvikIO */
int cuCtxGetCurrent(void **c) { *c = current[depth]; return 0; }
int cuMemGetAddressRange_v2(uint64_t *start, size_t *n, uint64_t p) {
  Alloc *a = find(p);
  if (!a) return 500;
  if (start) *start = a->start;
  if (n) *n = a->size;
  return 0;
}
#define UNSUPPORTED(f) int f(void) { return 801; }
UNSUPPORTED(cuMemHostAlloc) UNSUPPORTED(cuMemFreeHost) UNSUPPORTED(cuMemcpyAsync) UNSUPPORTED(cuCtxCreate_v4)
UNSUPPORTED(cuCtxDestroy_v2) UNSUPPORTED(cuGetErrorString) UNSUPPORTED(cuEventQuery)
