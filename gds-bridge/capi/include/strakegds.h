/* Ranges of files of a StrakeFS cluster into GPU memory and back, with a report of how every byte went.
 *
 *   cc program.c -lstrakegds
 *
 * Functions that return int return 0, or a negative errno; then strakegds_error() has a sentence. Every call but
 * strakegds_start_load() and strakegds_start_save() blocks until it is done. Several threads may use a bridge and its
 * files at a time, except while one of them is being closed. Nothing made before a fork(2) may be used in the child:
 * there, calls are -EINVAL.
 *
 * Addresses are those of the device (CUdeviceptr), in the primary context of the GPU, which is that of PyTorch and of
 * the CUDA runtime. The bridge does not wait for streams of the program: see strakegds_settle(). When a call returns,
 * its bytes are where they belong, and any stream may use them.
 */
#ifndef STRAKEGDS_H
#define STRAKEGDS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Tiers, best first: the index into `by_tier`. */
enum strakegds_tier {
  STRAKEGDS_GPU_RDMA = 0,
  STRAKEGDS_LOCAL_GDS = 1,
  STRAKEGDS_BOUNCE_RDMA = 2,
  STRAKEGDS_BOUNCE_TCP = 3,
  STRAKEGDS_PAGEABLE = 4
};
#define STRAKEGDS_TIERS 5

/* Where bytes were verified. */
enum strakegds_checksum {
  STRAKEGDS_CHECKSUM_NONE = 0,        /* no byte was moved */
  STRAKEGDS_CHECKSUM_AT_CLIENT = 1,   /* before the copy to the device, or after the copy from it */
  STRAKEGDS_CHECKSUM_AT_OSS_ONLY = 2, /* what happened behind the storage server is not known */
  STRAKEGDS_CHECKSUM_ON_GPU = 3       /* by the client, and on the GPU at its end of the copy */
};

struct strakegds;      /* a bridge: a client of a cluster, and a device */
struct strakegds_file; /* an open file */

/* Zero means the default of each. */
struct strakegds_options {
  size_t size;                  /* sizeof(struct strakegds_options) */
  const char *mds;              /* metadata servers: HOST[:PORT],...; has no default */
  const char *client_key;       /* file with the client key; "/etc/strake/client.key" */
  const char *memory;           /* "cuda:N", or "host" (this machine's own, in place of a device); "cuda:0" */
  const char *fabric;           /* transports to the storage servers: "auto", "tcp", "rdma"; "auto" */
  uint64_t pinned_limit;        /* bytes of host memory that all bridges of the process have pinned at most, when this one
                                 * pins more; half of RLIMIT_MEMLOCK, or 512 MiB of its own where that is without limit */
  uint32_t workers;             /* threads with a stream each; 4 */
  uint32_t slots;               /* pinned slots of each; 3 */
  uint32_t slot_bytes;          /* size of each; 4 MiB */
  uint32_t accept_oss_checksum; /* gpu-rdma and local-gds may be used although their bytes are verified where they
                                 * are stored only */
  /* Since version 2. Options that end before this, of programs of version 1, are taken as if it were 0. */
  uint32_t verify_on_gpu;       /* the device sums its own end of every copy, and the sums are compared; the report says
                                 * where that was not possible (`not_on_gpu` in strakegds_report_json()) */
  uint32_t reserved;            /* 0 */
  /* Since version 3. */
  const char *local;            /* folder with copies of sealed files on this node (`strake gds stage`), for the tier
                                 * local-gds; none */
  /* Since version 4. */
  const char *policy;           /* what every call of this bridge has to meet beside its own policy; "prefer" */
};

struct strakegds_range {
  struct strakegds_file *file;
  uint64_t offset;  /* in the file */
  uint64_t address; /* in the device's memory */
  uint64_t length;
};

struct strakegds_report {
  size_t size;                       /* set it to sizeof(struct strakegds_report) */
  uint64_t asked;                    /* bytes of all ranges */
  uint64_t moved;                    /* bytes that were certainly moved: the sum of by_tier */
  uint64_t by_tier[STRAKEGDS_TIERS]; /* by the tier that each byte took */
  uint64_t staged;                   /* of those, copied once more in host memory */
  uint64_t over_rdma;                /* bytes of `moved` that went over RDMA, in the network */
  uint32_t switches;                 /* how often the tier changed in the middle of the call */
  uint32_t checksum;                 /* enum strakegds_checksum */
  double seconds;
};

/* The version of this interface; grows when something is added. What is here does not change. */
#define STRAKEGDS_ABI 4
int strakegds_abi(void);

/* What the last call of this thread had to say; "" if it succeeded. Valid until the next call of this thread. */
const char *strakegds_error(void);

/* Connects, opens the device and runs the self-tests. */
int strakegds_open(const struct strakegds_options *options, struct strakegds **bridge);
/* Makes what was written safe, and ends. Its files must have been closed. NULL is nothing. */
void strakegds_close(struct strakegds *bridge);

/* The tiers, as JSON: which are available, and the reasons why the others are not. Valid until the thread's next call
 * of this. NULL: an error. */
const char *strakegds_tiers(struct strakegds *bridge);

/* Opens a regular file by its path from the root of the file system. `flags` as of open(2): O_RDONLY, O_WRONLY, O_RDWR,
 * O_CREAT (with `mode`), O_EXCL, O_TRUNC, O_DIRECT. */
int strakegds_file_open(struct strakegds *bridge, const char *path, int flags, uint32_t mode,
                        struct strakegds_file **file);
/* An error is of bytes that were written and lost. The handle is gone in any case. NULL is nothing. */
int strakegds_file_close(struct strakegds_file *file);
/* What every call that begins after this has to meet if a range is of this handle, for all of its bytes, beside its own
 * policy (since version 4); "prefer" (NULL) ends it. */
int strakegds_file_policy(struct strakegds_file *file, const char *policy);
int strakegds_file_size(struct strakegds_file *file, uint64_t *size);
/* Returns when everything written to the file is safe. */
int strakegds_file_sync(struct strakegds_file *file);
/* Gives a file another name, atomically, in place of what had it before. */
int strakegds_rename(struct strakegds *bridge, const char *from, const char *to);

/* Files into the device's memory, and the other way: `n` ranges of any files of the bridge in one call. `policy`:
 * "prefer" (NULL), "at-least:TIER" or "require:TIER", TIER being gpu-rdma, local-gds, bounce-rdma, bounce-tcp or
 * pageable. What the bridge (`policy` of its options) and the files (strakegds_file_policy()) demand has to be met, too.
 * `report` may be NULL; it is filled when the call fails on its way, too. -EINVAL: a range is not of this device, is
 * longer than its allocation, or overlaps another, or no tier meets all policies; -EOPNOTSUPP: no tier is available that
 * they allow; -EIO: that came to pass in the middle, or a file ends before its range; -ENODEV: the context is gone.
 * What is saved is with the storage servers when the call returns, and safe after strakegds_file_sync(). */
int strakegds_load(struct strakegds *bridge, const struct strakegds_range *ranges, size_t n, const char *policy,
                   struct strakegds_report *report);
int strakegds_save(struct strakegds *bridge, const struct strakegds_range *ranges, size_t n, const char *policy,
                   struct strakegds_report *report);
/* The same in the order of a stream, beside what the program does meanwhile (since version 3): they return at once, and
 * the call begins when all that `stream` (a CUstream of the device's primary context; NULL: the default one) was given
 * before is done. What it is given afterwards overlaps with the call, and may use the ranges only once
 * strakegds_finish() has returned, which waits for the end, says what strakegds_load() would have said, and frees the
 * call; -EINVAL for a report of a wrong size leaves the call as it is. Its files may not be closed before.
 * strakegds_is_done(): 1 if that would return at once, else 0. */
struct strakegds_call;
int strakegds_start_load(struct strakegds *bridge, const struct strakegds_range *ranges, size_t n, const char *policy,
                         void *stream, struct strakegds_call **call);
int strakegds_start_save(struct strakegds *bridge, const struct strakegds_range *ranges, size_t n, const char *policy,
                         void *stream, struct strakegds_call **call);
int strakegds_is_done(struct strakegds_call *call);
int strakegds_finish(struct strakegds_call *call, struct strakegds_report *report);
/* A file of `n` ranges of the device's memory, one behind the other (`file` and `offset` of each are not looked at):
 * written under another name, made safe, and then named `path` in place of what was there before. */
int strakegds_replace(struct strakegds *bridge, const char *path, uint32_t mode, const struct strakegds_range *ranges,
                      size_t n, const char *policy, struct strakegds_report *report);
/* The whole report of this thread's last load, save or replace, as JSON, also if it failed on its way; "" before the
 * first. Valid until the next of them. */
const char *strakegds_report_json(void);

/* Waits for everything that the program gave to the device before, on whatever stream. To be called before a load
 * into, or a save of, memory that work under way may still use. */
int strakegds_settle(struct strakegds *bridge);

/* Memory of the device, for programs that have no other way to get some, and slow copies of it, for tests. */
int strakegds_alloc(struct strakegds *bridge, uint64_t length, uint64_t *address);
int strakegds_free(struct strakegds *bridge, uint64_t address);
int strakegds_put(struct strakegds *bridge, uint64_t to, const void *from, size_t length);
int strakegds_get(struct strakegds *bridge, void *to, uint64_t from, size_t length);

#ifdef __cplusplus
}
#endif
#endif
