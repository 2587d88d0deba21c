/* What PyTorch asks of the CUDA runtime around a call of cuFile: which device is current. For LD_PRELOAD where no driver is that the runtime takes. */
static __thread int current;
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = current; return 0; }
int cudaSetDevice(int d) { current = d; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
