/* What the tests use of cuFile's interface, in declarations of our own. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

typedef struct { int err, cu_err; } Status;
typedef struct { int type; union { int fd; void *p; } handle; const void *ops; } Descr;
typedef struct { void *base; size_t len; } IoVec;
typedef struct { int mode; void *base; off_t offset, base_offset; size_t size; void *fh; int opcode; void *cookie; } Params;
typedef struct { void *cookie; int status; size_t ret; } Event;
typedef struct { uint64_t ok, err; } Counter;
typedef struct { unsigned major, minor; size_t poll, direct; unsigned dstatus, dcontrol, fflags, cache, per_buffer, pinned, batch, batch_ms; } Props;

Status cuFileDriverOpen(void);
Status cuFileDriverClose_v2(void);
long cuFileUseCount(void);
Status cuFileDriverGetProperties(Props *);
Status cuFileDriverSetMaxCacheSize(size_t);
Status cuFileHandleRegister(void **, Descr *);
void cuFileHandleDeregister(void *);
Status cuFileBufRegister(const void *, size_t, int);
Status cuFileBufDeregister(const void *);
ssize_t cuFileRead(void *, void *, size_t, off_t, off_t);
ssize_t cuFileWrite(void *, const void *, size_t, off_t, off_t);
ssize_t cuFileReadv(void *, const IoVec *, size_t, off_t, unsigned);
ssize_t cuFileWritev(void *, const IoVec *, size_t, off_t, unsigned);
Status cuFileReadAsync(void *, void *, size_t *, off_t *, off_t *, ssize_t *, void *);
Status cuFileWriteAsync(void *, void *, size_t *, off_t *, off_t *, ssize_t *, void *);
Status cuFileStreamRegister(void *, unsigned);
Status cuFileStreamDeregister(void *);
Status cuFileBatchIOSetUp(void **, unsigned);
Status cuFileBatchIOSubmit(void *, unsigned, Params *, unsigned);
Status cuFileBatchIOGetStatus(void *, unsigned, unsigned *, Event *, struct timespec *);
Status cuFileBatchIOCancel(void *);
void cuFileBatchIODestroy(void *);
Status cuFileGetVersion(int *);
Status cuFileSetParameterSizeT(int, size_t);
Status cuFileGetParameterSizeT(int, size_t *);
Status cuFileSetParameterBool(int, bool);
Status cuFileGetParameterString(int, char *, int);
Status cuFileSetStatsLevel(int);
Status cuFileGetStatsLevel(int *);
Status cuFileStatsStart(void);
Status cuFileStatsReset(void);
Status cuFileGetStatsL1(uint64_t *);
Status cuFileGetStatsL2(void *);
Status cuFileGetStatsL3(void *);
Status cuFileGetBARSizeInKB(int, size_t *);
Status cuFileExportPCIeTopology(const char *);
Status cuFileDriverGetP2PFlags(int, int *);
Status cuFileDriverSetP2PFlags(int, int);

/* The driver's, which the stand-in has. */
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);
int cuMemcpyHtoDAsync_v2(uint64_t, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, uint64_t, size_t, void *);
int cuStreamCreate(void **, unsigned);
int cuStreamSynchronize(void *);
int cuLaunchHostFunc(void *, void (*)(void *), void *);
void strake_standin_set(int, long);
