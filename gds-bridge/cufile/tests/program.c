/* A program that uses cuFile as programs do. Arguments: what to try, a folder of our mount, a folder elsewhere.
 * Ends with 0 if everything was as it should; otherwise with a line on stderr. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cufile.h"
#include "helpers.h"

static void io(void) {
  Props p;
  int version;
  IS(cuFileGetVersion(&version).err, 0);
  IS(version, 1200);
  IS(cuFileDriverClose_v2().err, 5001);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileUseCount(), 2);
  IS(cuFileDriverGetProperties(&p).err, 0);
  CHECK(p.major == 0 && p.dstatus == 0 && p.batch == 128 && (p.dcontrol & 2));
  int fd = made(ours, "a", O_RDWR | O_DIRECT | O_EXCL);
  void *h = registered(fd), *dev = device(2 * MIB), *none = 0;
  IS(try_register(fd, &none), 5028);
  IS(cuFileBufRegister(dev, 2 * MIB, 0).err, 0);
  IS(cuFileBufRegister(dev, 2 * MIB, 0).err, 5023);

  /* What the bridge wrote the mount has, and the other way round. */
  char *data = pattern(1, LEN), *back = malloc(2 * MIB);
  struct stat st;
  put(dev, data, LEN);
  IS(cuFileWrite(h, dev, LEN, 0, 0), LEN);
  IS(fstat(fd, &st), 0);
  IS(st.st_size, LEN);
  IS(pread(fd, back, 2 * MIB, 0), LEN);
  CHECK(!memcmp(back, data, LEN));
  IS(pwrite(fd, "from the mount", 14, 123457), 14);
  memcpy(data + 123457, "from the mount", 14);
  IS(cuFileRead(h, dev, LEN, 0, 0), LEN);
  CHECK(same(dev, data, LEN));

  /* Nothing needs to be aligned. */
  IS(cuFileRead(h, dev, 100001, 7, 13), 100001);
  CHECK(same((char *)dev + 13, data + 7, 100001));
  IS(cuFileWrite(h, dev, 5001, LEN - 3, 13), 5001);
  data = realloc(data, LEN + 4998);
  memcpy(data + LEN - 3, data + 7, 5001);
  IS(pread(fd, back, 2 * MIB, 0), LEN + 4998);
  CHECK(!memcmp(back, data, LEN + 4998));

  /* Where the file ends. */
  IS(cuFileRead(h, dev, 2 * MIB, 0, 0), LEN + 4998);
  CHECK(same(dev, data, LEN + 4998));
  IS(cuFileRead(h, dev, 100, LEN + 4993, 0), 5);
  IS(cuFileRead(h, dev, 100, LEN + 4998, 0), 0);
  IS(cuFileRead(h, dev, 100, 1ll << 50, 0), 0);
  IS(cuFileRead(h, dev, 0, 0, 0), 0);
  IS(ftruncate(fd, 1000), 0);
  IS(cuFileRead(h, dev, 2000, 0, 0), 1000);

  /* Host memory, and pieces of both. */
  IS(cuFileRead(h, back, 2000, 500, 3), 500);
  CHECK(!memcmp(back + 3, data + 500, 500));
  IS(cuFileWrite(h, data, LEN, 1000, 1000), LEN);
  IS(cuFileRead(h, dev, LEN, 1000, 0), LEN);
  CHECK(same(dev, data + 1000, LEN - 1000));
  IoVec v[3] = {{dev, 1000}, {back, 70000}, {(char *)dev + 5000, MIB}};
  IS(cuFileReadv(h, v, 3, 100, 0), LEN + 900);
  CHECK(same(dev, data + 100, 1000) && !memcmp(back, data + 1100, 70000) && same((char *)dev + 5000, data + 71100, 100000));
  v[2].len = 1000;
  IS(cuFileWritev(h, v, 3, 2000000, 0), 72000);
  IS(pread(fd, back + 100000, 100000, 2000000), 72000);
  CHECK(!memcmp(back + 100000, data + 100, 72000));
  IS(cuFileReadv(h, v, 3, 0, 1), -5022);
  IS(cuFileReadv(h, v, 1025, 0, 0), -5022);
  IS(cuFileReadv(h, 0, 1, 0, 0), -5022);

  /* Memory of another GPU. */
  use_device(1);
  void *second = device(MIB);
  use_device(0);
  IS(cuFileRead(h, second, 1000, 0, 0), 1000);
  CHECK(same(second, data, 1000));

  /* Another name, none, and another file of the old one: it stays the file that it was. */
  char from[4096];
  strcpy(from, name(ours, "a"));
  IS(rename(from, name(ours, "b")), 0);
  IS(cuFileRead(h, dev, 1000, 0, 0), 1000);
  IS(unlink(name(ours, "b")), 0);
  int other = made(ours, "a", O_RDWR | O_EXCL);
  IS(write(other, "wrong", 5), 5);
  memset(back, 0, 1000);
  put(dev, back, 1000);
  IS(cuFileRead(h, dev, 1000, 0, 0), 1000);
  CHECK(same(dev, data, 1000));
  int late = open(name(ours, "a"), O_RDWR);
  IS(unlink(name(ours, "a")), 0);
  void *unnamed = registered(late);
  IS(cuFileRead(unnamed, dev, 1000, 0, 0), 5);
  CHECK(same(dev, "wrong", 5));
  cuFileHandleDeregister(unnamed);

  IS(cuFileBufDeregister(dev).err, 0);
  IS(cuFileBufDeregister(dev).err, 5022);
  cuFileHandleDeregister(h);
  IS(cuFileRead(h, dev, 10, 0, 0), -5027);
  cuFileHandleDeregister(h);
  h = registered(fd);
  IS(cuFileDriverClose_v2().err, 0);
  IS(cuFileRead(h, dev, 10, 0, 0), 10);
  IS(cuFileDriverClose_v2().err, 0);
  IS(cuFileUseCount(), 0);
  IS(cuFileRead(h, dev, 10, 0, 0), -5001);
  IS(cuFileDriverClose_v2().err, 5001);
  /* Registering opens it again, as programs expect that never open it. */
  h = registered(fd);
  IS(cuFileUseCount(), 1);
  IS(cuFileRead(h, dev, 10, 0, 0), 10);
}

static void errors(void) {
  int fd = made(ours, "e", O_RDWR), ro = open(name(ours, "e"), O_RDONLY), wo = open(name(ours, "e"), O_WRONLY);
  void *h, *none = (void *)77, *dev = device(MIB), *next = device(MIB);
  IS(cuFileRead((void *)0x1234, dev, 10, 0, 0), -5001);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileRead((void *)0x1234, dev, 10, 0, 0), -5027);
  IS(cuFileRead(0, dev, 10, 0, 0), -5027);
  IS(cuFileWrite(&fd, dev, 10, 0, 0), -5027);
  cuFileHandleDeregister(&fd);
  cuFileHandleDeregister(0);
  Descr d = {.type = 1, .handle.fd = fd};
  IS(cuFileHandleRegister(0, &d).err, 5022);
  IS(cuFileHandleRegister(&none, 0).err, 5022);
  d.type = 9;
  IS(cuFileHandleRegister(&none, &d).err, 5022);
  /* A handle of another system, and a file system in the program: there is nobody who knows them. */
  for (d.type = 2; d.type <= 3; d.type++) IS(cuFileHandleRegister(&none, &d).err, 5008);
  IS(try_register(-1, &none), 5022);
  int closed = dup(fd);
  close(closed);
  IS(try_register(closed, &none), 5022);
  int app = open(name(ours, "e"), O_WRONLY | O_APPEND), dir = open(ours, O_RDONLY);
  IS(try_register(app, &none), 5019);
  IS(try_register(dir, &none), 5018);
  IS((long)none, 77);

  h = registered(fd);
  char *data = pattern(2, MIB), *back = malloc(MIB);
  put(dev, data, MIB);
  IS(cuFileWrite(h, dev, MIB, 0, 0), MIB);
  IS(cuFileRead(h, dev, 10, -1, 0), -5022);
  IS(cuFileRead(h, dev, 10, 0, -1), -5022);
  IS(cuFileRead(h, 0, 10, 0, 0), -5022);
  IS(cuFileRead(h, dev, (size_t)-1, 0, 0), -5022);
  IS(cuFileWrite(h, dev, 10, -1, 0), -5022);
  FAILS(cuFileWrite(h, dev, 10, 0x7fffffffffffffffll, 0), EFBIG);
  /* Memory that is none. */
  IS(cuFileRead(h, (void *)(1ull << 60 | 16), 10, 0, 0), -5012);
  IS(cuFileRead(h, (void *)16, 10, 0, 0), -5012);
  IS(cuFileWrite(h, (void *)16, 10, 0, 0), -5012);
  IS(cuFileRead(h, dev, MIB + 1, 0, 0), -5014);
  IS(cuFileRead(h, dev, 10, 0, MIB - 5), -5014);
  IS(cuFileWrite(h, dev, MIB, 0, 1), -5014);
  IS(cuFileBufRegister(dev, MIB + 1, 0).err, 5014);
  IS(cuFileBufRegister(0, 10, 0).err, 5022);
  IS(cuFileBufRegister(dev, 0, 0).err, 5022);
  IS(cuFileBufRegister((void *)16, 10, 0).err, 5012);
  IS(cuFileBufDeregister(next).err, 5022);
  IS(cuMemFree_v2((uint64_t)next), 0);
  IS(cuFileRead(h, next, 10, 0, 0), -5012);
  IS(cuFileWrite(h, next, 10, 0, 0), -5012);
  /* What the descriptor may not do, nobody may. */
  void *reads = registered(ro), *writes = registered(wo);
  FAILS(cuFileWrite(reads, dev, 10, 0, 0), EBADF);
  FAILS(cuFileRead(writes, dev, 10, 0, 0), EBADF);
  FAILS(cuFileWrite(reads, back, 10, 0, 0), EBADF);
  IS(cuFileRead(reads, dev, 10, 0, 0), 10);
  IS(cuFileWrite(writes, dev, 10, 0, 0), 10);
  /* The descriptor is closed and another file gets its number: the handle stays what it was. */
  close(ro);
  int other = made(ours, "e2", O_RDWR);
  IS(other, ro);
  IS(pwrite(other, "another", 7, 0), 7);
  IS(cuFileRead(reads, dev, 7, 0, 0), 7);
  CHECK(same(dev, data, 7));
  void *second = registered(other);
  IS(cuFileRead(second, dev, 100, 0, 0), 7);
  CHECK(same(dev, "another", 7));
  /* An error of the device in the middle is one of the call, and errno and code tell it. */
  strake_standin_set(2, 719);
  FAILS(cuFileRead(h, dev, MIB, 0, 0), EIO);
  strake_standin_set(2, 0);
  /* It stays one of its streams: no tier is left, and no call says otherwise. */
  IS(cuFileRead(h, dev, MIB, 0, 0), -5008);
  /* Parameters. */
  size_t n;
  char text[4];
  IS(cuFileSetParameterSizeT(9, 4).err, 5026);
  IS(cuFileGetParameterSizeT(99, &n).err, 5022);
  IS(cuFileGetParameterSizeT(9, 0).err, 5022);
  IS(cuFileGetParameterString(0, text, 0).err, 5022);
  IS(cuFileGetParameterString(0, text, 4).err, 0);
  /* What only the real library can tell. */
  int flags = 77;
  IS(cuFileGetBARSizeInKB(0, &n).err, 5007);
  IS(cuFileExportPCIeTopology("/nowhere/topology").err, 5007);
  IS(cuFileDriverGetP2PFlags(0, &flags).err, 5007);
  IS(flags, 77);
  IS(cuFileDriverSetP2PFlags(0, 1).err, 5007);
  IS(cuFileDriverGetProperties(0).err, 5022);
  IS(cuFileGetVersion(0).err, 5022);
}

/* The context is destroyed in the middle of a call. */
static void gone(void) {
  int fd = made(ours, "g", O_RDWR);
  void *h = registered(fd), *dev = device(MIB);
  char host[10];
  IS(cuFileWrite(h, dev, MIB, 0, 0), MIB);
  strake_standin_set(1, 2);
  IS(cuFileRead(h, dev, MIB, 0, 0), -5011);
  IS(cuFileRead(h, dev, MIB, 0, 0), -5011);
  IS(cuFileWrite(h, dev, 10, 0, 0), -5011);
  IS(cuFileBufRegister(dev, 10, 0).err, 5011);
  IS(cuFileRead(h, host, 10, 0, 0), -5011);
}

static void set_size(void *p) { *(size_t *)p = 4321; }
static ssize_t seen[2];
static void see(void *p) { seen[0] = *(ssize_t *)p; }

static volatile int entered, leave;
static void stay(void *none) { (void)none; entered = 1; while (!leave) usleep(1000); }
static void *last_h, *last_dev, *last_s;
static void *late(void *none) { IS(cuCtxSetCurrent(0), 0); IS(cuFileRead(last_h, last_dev, 10, 0, 0), -5027); return none; }
static void *in_stream(void *none) {
  size_t size = 10;
  off_t zero = 0;
  ssize_t bytes = 0;
  use_device(0);
  IS(cuFileReadAsync(last_h, last_dev, &size, &zero, &zero, &bytes, last_s).err, 0);
  IS(bytes, 10);
  return none;
}
static void *last(void *none) { IS(cuCtxSetCurrent(0), 0); IS(cuFileRead(last_h, last_dev, 10, 0, 0), 10); return none; }

static void streams(void) {
  IS(cuFileStreamRegister(0, 0).err, 5001);
  IS(cuFileDriverOpen().err, 0);
  int fd = made(ours, "s", O_RDWR);
  void *h = registered(fd), *dev = device(MIB), *s;
  IS(cuStreamCreate(&s, 1), 0);
  IS(cuFileStreamRegister(s, 16).err, 5022);
  IS(cuFileStreamRegister(s, 15).err, 0);
  char *a = pattern(3, MIB), *b = pattern(4, MIB), *back = malloc(MIB), *zeros = calloc(1, MIB);
  put(dev, zeros, MIB);
  size_t size = LEN;
  off_t offset = 0, from = 0;
  ssize_t bytes = -99;
  /* What the stream is still to write is what goes to the file. */
  IS(cuMemcpyHtoDAsync_v2((uint64_t)dev, a, LEN, s), 0);
  IS(cuFileWriteAsync(h, dev, &size, &offset, &from, &bytes, s).err, 0);
  IS(cuLaunchHostFunc(s, see, &bytes), 0);
  IS(cuStreamSynchronize(s), 0);
  IS(bytes, LEN);
  IS(seen[0], LEN);
  IS(pread(fd, back, MIB, 0), LEN);
  CHECK(!memcmp(back, a, LEN));
  /* What the stream is still to read is read before it is written over; and the size is that of the moment. */
  put(dev, b, MIB);
  bytes = -99;
  IS(cuMemcpyDtoHAsync_v2(back, (uint64_t)dev, MIB, s), 0);
  IS(cuLaunchHostFunc(s, set_size, &size), 0);
  IS(cuFileReadAsync(h, dev, &size, &offset, &from, &bytes, s).err, 0);
  char *after = malloc(5000);
  IS(cuMemcpyDtoHAsync_v2(after, (uint64_t)dev, 5000, s), 0);
  IS(cuStreamSynchronize(s), 0);
  IS(bytes, 4321);
  CHECK(!memcmp(back, b, MIB) && !memcmp(after, a, 4321) && !memcmp(after + 4321, b + 4321, 5000 - 4321));
  /* Calls without a stream come after the default one, as copies of the driver would. */
  put(dev, b, MIB);
  IS(cuMemcpyDtoHAsync_v2(back, (uint64_t)dev, MIB, 0), 0);
  IS(cuFileRead(h, dev, LEN, 0, 0), LEN);
  IS(cuStreamSynchronize(0), 0);
  CHECK(!memcmp(back, b, MIB) && same(dev, a, LEN));
  IS(cuMemcpyHtoDAsync_v2((uint64_t)dev, b, MIB, 0), 0);
  IS(cuFileWrite(h, dev, MIB, 0, 0), MIB);
  IS(pread(fd, back, MIB, 0), MIB);
  CHECK(!memcmp(back, b, MIB));
  /* Where the file ends, and what fails: told where bytes are told. */
  size = 100, offset = MIB - 10;
  IS(cuFileReadAsync(h, dev, &size, &offset, &from, &bytes, 0).err, 0);
  IS(bytes, 10);
  offset = -1;
  IS(cuFileReadAsync(h, dev, &size, &offset, &from, &bytes, s).err, 0);
  IS(bytes, -5022);
  bytes = -99, offset = 0;
  IS(cuFileReadAsync(h, dev, 0, &offset, &from, &bytes, s).err, 5022);
  IS(cuFileReadAsync(&fd, dev, &size, &offset, &from, &bytes, s).err, 5027);
  strake_standin_set(10, 1); /* a graph is recorded, and no call touches that */
  IS(cuFileReadAsync(h, dev, &size, &offset, &from, &bytes, s).err, 5038);
  IS(cuFileRead(h, dev, 10, 0, 0), -5038);
  strake_standin_set(10, 0);
  strake_standin_set(9, 900);
  IS(cuFileReadAsync(h, dev, &size, &offset, &from, &bytes, s).err, 5038);
  strake_standin_set(9, 700);
  Status e = cuFileWriteAsync(h, dev, &size, &offset, &from, &bytes, s);
  CHECK(e.err == 5011 && e.cu_err == 700);
  strake_standin_set(9, 0);
  IS(bytes, -99);
  IS(cuFileStreamDeregister(s).err, 0);
  IS(cuFileStreamDeregister(s).err, 5022);
  /* While a call waits for the default stream, the driver is not closed under it. */
  pthread_t t;
  last_h = h, last_dev = dev;
  IS(cuLaunchHostFunc(0, stay, 0), 0);
  IS(pthread_create(&t, 0, last, 0), 0);
  while (!entered) usleep(1000);
  IS(cuFileDriverClose_v2().err, 5006);
  IS(cuFileUseCount(), 1);
  leave = 1;
  IS(pthread_join(t, 0), 0);
  /* Nor while one waits for a stream of the program. */
  last_s = s, entered = leave = 0;
  IS(cuLaunchHostFunc(s, stay, 0), 0);
  IS(pthread_create(&t, 0, in_stream, 0), 0);
  while (!entered) usleep(1000);
  IS(cuFileDriverClose_v2().err, 5006);
  leave = 1;
  IS(pthread_join(t, 0), 0);
  /* Host memory comes after the default stream as well. */
  put(dev, a, 1000);
  memset(back, 0, 1000);
  IS(cuMemcpyDtoHAsync_v2(back, (uint64_t)dev, 1000, 0), 0);
  IS(cuFileWrite(h, back, 1000, 0, 0), 1000);
  IS(cuFileRead(h, dev, 1000, 0, 0), 1000);
  CHECK(same(dev, a, 1000));
  /* A handle that is let go while a call waits: that call opens nothing again. */
  entered = leave = 0;
  IS(cuLaunchHostFunc(0, stay, 0), 0);
  IS(pthread_create(&t, 0, late, 0), 0);
  while (!entered) usleep(1000);
  cuFileHandleDeregister(h);
  leave = 1;
  IS(pthread_join(t, 0), 0);
  IS(cuFileDriverClose_v2().err, 0);
}

/* What a call in a stream stores, as the work after it in the stream sees it. */
static ssize_t stored(int save, void *h, void *base, size_t size, off_t offset, off_t from, void *s) {
  ssize_t bytes = 12345;
  IS((save ? cuFileWriteAsync : cuFileReadAsync)(h, base, &size, &offset, &from, &bytes, s).err, 0);
  IS(cuLaunchHostFunc(s, see, &bytes), 0);
  IS(cuStreamSynchronize(s), 0);
  IS(seen[0], bytes);
  return bytes;
}

/* What *bytes_read_p and *bytes_written_p are: bytes, -1 where a file system would say errno, else a negative code. */
static void told_in_streams(void) {
  enum { LOAD, SAVE };
  int fd = made(ours, "told", O_RDWR), ro = open(name(ours, "told"), O_RDONLY), wo = open(name(ours, "told"), O_WRONLY);
  void *h = registered(fd), *reads = registered(ro), *writes = registered(wo), *dev = device(MIB), *streams[2] = {0};
  char *data = pattern(11, LEN), *ones = malloc(MIB);
  memset(ones, 1, MIB);
  struct stat st;
  IS(cuStreamCreate(&streams[1], 1), 0);
  for (int i = 0; i < 2; i++) {
    void *s = streams[i];
    put(dev, data, LEN);
    IS(stored(SAVE, h, dev, LEN, 0, 0, s), LEN);
    put(dev, ones, MIB);
    IS(stored(LOAD, h, dev, LEN, 0, 0, s), LEN);
    CHECK(same(dev, data, LEN) && same((char *)dev + LEN, ones, MIB - LEN));
    IS(stored(LOAD, h, dev, 0, 0, 0, s), 0);
    IS(stored(SAVE, h, dev, 0, 5 * MIB, 0, s), 0);
    /* Where the file ends, and behind that. */
    put(dev, ones, MIB);
    IS(stored(LOAD, h, dev, MIB, 7, 13, s), -5014);
    IS(stored(LOAD, h, dev, MIB - 13, 100003, 13, s), LEN - 100003);
    CHECK(same((char *)dev + 13, data + 100003, LEN - 100003) && same((char *)dev + LEN - 99990, ones, 90000));
    IS(stored(LOAD, h, dev, 100, LEN - 1, 0, s), 1);
    IS(stored(LOAD, h, dev, 100, LEN, 0, s), 0);
    IS(stored(LOAD, h, dev, 100, 1ll << 50, 0, s), 0);
    /* What the file refuses. */
    IS(stored(SAVE, reads, dev, 10, 0, 0, s), -1);
    IS(stored(LOAD, writes, dev, 10, 0, 0, s), -1);
    IS(stored(SAVE, h, dev, 10, 0x7fffffffffffffffll, 0, s), -1);
    /* What the interface and the device refuse. */
    for (int save = LOAD; save <= SAVE; save++) {
      IS(stored(save, h, dev, 10, -1, 0, s), -5022);
      IS(stored(save, h, dev, (size_t)-1, 0, 0, s), -5022);
      IS(stored(save, h, (void *)16, 10, 0, 0, s), -5012);
      IS(stored(save, h, dev, MIB, 0, 1, s), -5014);
    }
    /* Nothing of all that was written. */
    IS(fstat(fd, &st), 0);
    IS(st.st_size, LEN);
  }
  /* The device fails in the middle; then no tier is left. */
  strake_standin_set(2, 719);
  IS(stored(LOAD, h, dev, LEN, 0, 0, streams[1]), -1);
  strake_standin_set(2, 0);
  IS(stored(LOAD, h, dev, LEN, 0, 0, streams[1]), -5008);
  IS(stored(SAVE, h, dev, LEN, 0, 0, streams[1]), -5008);
}

/* The context is destroyed when the stream was waited for: the call began, so its bytes tell. */
static void gone_in_stream(void) {
  int fd = made(ours, "gone", O_RDWR);
  void *h = registered(fd), *dev = device(MIB);
  size_t size = MIB;
  off_t zero = 0;
  ssize_t bytes = 12345;
  IS(cuFileWriteAsync(h, dev, &size, &zero, &zero, &bytes, 0).err, 0);
  IS(bytes, MIB);
  strake_standin_set(1, 2);
  IS(cuFileReadAsync(h, dev, &size, &zero, &zero, &bytes, 0).err, 0);
  IS(bytes, -5011);
  IS(cuFileWriteAsync(h, dev, &size, &zero, &zero, &bytes, 0).err, 0);
  IS(bytes, -5011);
}

static void batches(void) {
  enum { N = 16, PART = 65537 };
  void *b, *none = 0;
  IS(cuFileBatchIOSetUp(&b, 4).err, 5001);
  IS(cuFileSetParameterSizeT(9, N).err, 0);
  IS(cuFileDriverOpen().err, 0);
  Props props;
  IS(cuFileDriverGetProperties(&props).err, 0);
  IS(props.batch, N);
  int fd = made(ours, "batch", O_RDWR);
  void *h = registered(fd), *dev = device(N * PART);
  IS(cuFileBatchIOSetUp(&none, 0).err, 5022);
  IS(cuFileBatchIOSetUp(&none, N + 1).err, 5022);
  IS(cuFileBatchIOSetUp(0, 1).err, 5022);
  IS(cuFileBatchIOSetUp(&b, N).err, 0);
  char *data = pattern(5, N * PART), *back = malloc(N * PART);
  put(dev, data, N * PART);
  Params p[N + 1];
  Event e[N + 1];
  struct timespec soon = {0, 1000000}, bad = {0, -1};
  for (long i = 0; i <= N; i++) p[i] = (Params){1, dev, i * PART, i * PART, PART, h, 1, (void *)(i + 1)};
  IS(cuFileBatchIOSubmit(b, N + 1, p, 0).err, 5037);
  IS(cuFileBatchIOSubmit(b, 0, p, 0).err, 5022);
  IS(cuFileBatchIOSubmit(b, 1, 0, 0).err, 5022);
  IS(cuFileBatchIOSubmit(b, 1, p, 1).err, 5022);
  IS(cuFileBatchIOSubmit(&fd, 1, p, 0).err, 5022);
  p[1].mode = 2;
  IS(cuFileBatchIOSubmit(b, 2, p, 0).err, 5022);
  p[1].mode = 1, p[1].fh = &fd;
  IS(cuFileBatchIOSubmit(b, 2, p, 0).err, 5027);
  p[1].fh = h;
  unsigned n = N;
  /* Nothing of those was begun: nothing is waited for. */
  IS(cuFileBatchIOGetStatus(b, 1, &n, e, 0).err, 0);
  IS(n, 0);
  IS(cuFileBatchIOSubmit(b, N, p, 0).err, 0);
  IS(cuFileBatchIOSubmit(b, 1, p, 0).err, 5037);
  n = N;
  IS(cuFileBatchIOGetStatus(b, N + 1, &n, e, 0).err, 5022);
  IS(cuFileBatchIOGetStatus(b, 1, &n, e, &bad).err, 5022);
  IS(cuFileBatchIOGetStatus(b, N, &n, e, 0).err, 0);
  IS(n, N);
  long cookies = 0;
  for (int i = 0; i < N; i++) { IS(e[i].status, 0x10); IS(e[i].ret, PART); cookies += (long)e[i].cookie; }
  IS(cookies, N * (N + 1) / 2);
  IS(pread(fd, back, N * PART, 0), N * PART);
  CHECK(!memcmp(back, data, N * PART));
  /* Reads, one short, and some that fail, each for itself. */
  for (int i = 0; i < N; i++) p[i].opcode = 0;
  p[2].offset = N * PART - 9, p[3].offset = -1, p[4].base_offset = N * PART, p[5].base = (void *)16;
  memset(back, 0, N * PART);
  put(dev, back, N * PART);
  IS(cuFileBatchIOSubmit(b, N, p, 0).err, 0);
  for (unsigned got = 0; got < N;) {
    n = 5;
    IS(cuFileBatchIOGetStatus(b, 1, &n, e, &soon).err, 0);
    CHECK(n <= 5);
    for (unsigned i = 0; i < n; i++) switch ((long)e[i].cookie) {
      case 3: IS(e[i].status, 0x10); IS(e[i].ret, 9); break;
      case 4: IS(e[i].status, 0x40); IS(e[i].ret, -5022); break;
      case 5: IS(e[i].status, 0x40); IS(e[i].ret, -5014); break;
      case 6: IS(e[i].status, 0x40); IS(e[i].ret, -5012); break;
      default: IS(e[i].status, 0x10); IS(e[i].ret, PART);
    }
    got += n;
  }
  CHECK(same(dev, data, 2 * PART) && same((char *)dev + 6 * PART, data + 6 * PART, 10 * PART));
  /* Cancelled or done, but told once each. */
  for (int i = 0; i < N; i++) p[i] = (Params){1, dev, i * PART, i * PART, PART, h, 0, (void *)(long)i};
  IS(cuFileBatchIOSubmit(b, N, p, 0).err, 0);
  IS(cuFileBatchIOCancel(b).err, 0);
  n = N;
  IS(cuFileBatchIOGetStatus(b, N, &n, e, 0).err, 0);
  IS(n, N);
  for (int i = 0; i < N; i++) CHECK((e[i].status == 0x10 && e[i].ret == PART) || (e[i].status == 8 && !e[i].ret));
  IS(cuFileBatchIOSubmit(b, N, p, 0).err, 0);
  cuFileBatchIODestroy(b);
  IS(cuFileBatchIOSubmit(b, 1, p, 0).err, 5022);
  IS(cuFileBatchIOCancel(b).err, 5022);
  cuFileBatchIODestroy(b);
  IS(cuFileDriverClose_v2().err, 0);
  /* The driver is not closed over entries that nobody has begun yet. */
  for (int i = 0; i < 30; i++) {
    memset(back, i + 1, 1000);
    put(dev, back, 1000);
    IS(cuFileDriverOpen().err, 0);
    h = registered(fd);
    IS(cuFileBatchIOSetUp(&b, N).err, 0);
    for (int k = 0; k < N; k++) p[k] = (Params){1, dev, k * 1000, 0, 1000, h, 1, 0};
    IS(cuFileBatchIOSubmit(b, N, p, 0).err, 0);
    int err;
    while ((err = cuFileDriverClose_v2().err)) { IS(err, 5006); usleep(100); }
    IS(pread(fd, back, N * 1000, 0), N * 1000);
    for (int k = 0; k < N * 1000; k++) IS(back[k], i + 1);
  }
}

/* Asked before anything is open, and a child that is the first to open it. */
static void early_fork(void) {
  size_t n;
  IS(cuFileGetParameterSizeT(9, &n).err, 0);
  IS(cuFileUseCount(), 0);
  pid_t child = fork();
  if (!child) {
    int fd = made(ours, "early", O_RDWR);
    void *h = registered(fd), *dev = device(MIB);
    IS(cuFileWrite(h, dev, 100, 0, 0), 100);
    IS(cuFileRead(h, dev, MIB, 0, 0), 100);
    exit(42);
  }
  int status;
  IS(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
}

/* Counters of a program that was built with an older version: nothing beyond its structs is written. */
static void old_statistics(void) {
  static unsigned char room[6000];
  uint64_t *l = (uint64_t *)room;
  int version;
  IS(cuFileGetVersion(&version).err, 0);
  IS(version, 1150);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileSetStatsLevel(3).err, 0);
  IS(cuFileStatsStart().err, 0);
  int fd = made(ours, "old", O_RDWR);
  void *h = registered(fd), *dev = device(MIB);
  IS(cuFileWrite(h, dev, 8192, 0, 0), 8192);
  const int sizes[] = {512, 1024, 5000};
  for (int i = 0; i < 3; i++) {
    memset(room, 0xee, sizeof room);
    IS((i == 0 ? cuFileGetStatsL1((void *)room) : i == 1 ? cuFileGetStatsL2((void *)room) : cuFileGetStatsL3((void *)room)).err, 0);
    for (int k = 0; k < 1000; k++) IS(room[sizes[i] + k], 0xee);
    IS(l[2], 1); /* writes */
    if (i > 0) IS(l[512 / 8 + 32 + 4], 1); /* one of 8 KiB */
    if (i > 1) IS(l[1032 / 8 + 15], 8192); /* the first GPU's */
  }
}

static void forks(void) {
  int fd = made(ours, "f", O_RDWR);
  void *h = registered(fd), *dev = device(MIB), *none;
  char *data = pattern(6, MIB);
  put(dev, data, MIB);
  IS(cuFileWrite(h, dev, MIB, 0, 0), MIB);
  pid_t child = fork();
  if (!child) {
    IS(cuFileRead(h, dev, 10, 0, 0), -5001);
    IS(cuFileDriverOpen().err, 5001);
    IS(cuFileDriverClose_v2().err, 5001);
    IS(cuFileUseCount(), 0);
    IS(try_register(fd, &none), 5001);
    cuFileHandleDeregister(h);
    exit(42); /* with what runs at the end */
  }
  int status;
  IS(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
  IS(cuFileRead(h, dev, 10, 0, 0), 10);
}

static void statistics(void) {
  static uint64_t l[5112 / 8];
  int level;
  IS(cuFileStatsStart().err, 5001);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileSetStatsLevel(4).err, 5022);
  IS(cuFileSetStatsLevel(3).err, 0);
  IS(cuFileGetStatsLevel(&level).err, 0);
  IS(level, 3);
  IS(cuFileStatsStart().err, 0);
  int fd = made(ours, "st", O_RDWR);
  void *h = registered(fd), *dev = device(MIB);
  IS(cuFileBufRegister(dev, MIB, 0).err, 0);
  IS(cuFileWrite(h, dev, 8192, 0, 0), 8192);
  IS(cuFileRead(h, dev, MIB, 0, 0), 8192);
  IS(cuFileRead(h, dev, 4096, 4096, 0), 4096);
  IS(cuFileRead(h, dev, 10, -1, 0), -5022);
  IS(cuFileGetStatsL3(l).err, 0);
  /* Level 1: ok and err of reads, writes, handles; bytes. */
  IS(l[0], 2); IS(l[1], 1); IS(l[2], 1); IS(l[3], 0); IS(l[4], 1);
  IS(l[8], 1); IS(l[12], 12288); IS(l[13], 8192);
  uint32_t gpus;
  memcpy(&gpus, (char *)l + 1136, 4);
  IS(gpus, 1);
  uint64_t *g = l + 1144 / 8;
  CHECK(*(unsigned char *)g == 0xa0);
  IS(g[2], 12288);
  /* Through host memory: not one of them by nvidia-fs or straight. */
  IS(g[6], 2); IS(g[7], 0); IS(g[8], 0); IS(g[9], 2);
  IS(g[10], 0);
  IS(g[15], 8192); IS(g[19], 1); IS(g[20], 0); IS(g[21], 0); IS(g[22], 1);
  IS(cuFileStatsReset().err, 0);
  IS(cuFileGetStatsL1(l).err, 0);
  IS(l[0], 0);
  IS(cuFileSetStatsLevel(0).err, 0);
  IS(cuFileGetStatsL1(l).err, 5022);
  IS(cuFileDriverClose_v2().err, 0);
}

static void foreign(int mixed) {
  IS(cuFileSetParameterSizeT(9, 8).err, 0);
  IS(cuFileSetParameterBool(1, false).err, 0);
  IS(cuFileDriverOpen().err, 0);
  int fd = made(elsewhere, "x", O_RDWR), mine = made(ours, "x", O_RDWR);
  void *dev = device(MIB);
  IS(cuFileBufRegister(dev, MIB, 3).err, 0);
  char *data = pattern(7, MIB);
  put(dev, data, MIB);
  void *o = registered(mine);
  IS(cuFileWrite(o, dev, 1000, 0, 0), 1000);
  void *h = registered(fd);
  IS(cuFileRead(h, dev, 100, 5, 6), 77);
  IS(cuFileWrite(h, dev, 100, 7, 8), 100);
  size_t size = 9;
  off_t zero = 0;
  ssize_t bytes = 0;
  IS(cuFileReadAsync(h, dev, &size, &zero, &zero, &bytes, 0).err, 0);
  IS(bytes, 5);
  IS(cuFileWriteAsync(h, dev, &size, &zero, &zero, &bytes, 0).err, 5007); /* it has none */
  if (mixed) {
    void *b;
    Params p[3] = {{1, dev, 0, 0, 20, h, 0, (void *)1}, {1, dev, 0, 0, 1000, o, 0, (void *)2}, {1, dev, 0, 0, 20, h, 0, (void *)3}};
    Event e[8];
    unsigned n = 8;
    IS(cuFileBatchIOSetUp(&b, 8).err, 0);
    IS(cuFileBatchIOSubmit(b, 3, p, 0).err, 0);
    IS(cuFileBatchIOGetStatus(b, 3, &n, e, 0).err, 0);
    IS(n, 3);
    for (int i = 0; i < 3; i++) { IS(e[i].status, 0x10); IS(e[i].ret, e[i].cookie == (void *)2 ? 1000 : 11); }
    cuFileBatchIODestroy(b);
  }
  cuFileHandleDeregister(h);
  IS(cuFileRead(h, dev, 10, 0, 0), -5027);
  IS(cuFileBufDeregister(dev).err, 0);
  IS(cuFileDriverClose_v2().err, 0);
}

/* A read and a write of so many bytes of a file elsewhere of that size, by itself and in a batch, and what they are to say. */
static void one_foreign(long want, int number, size_t len, off_t size) {
  int fd = made(elsewhere, "x", O_RDWR);
  IS(ftruncate(fd, size), 0);
  void *h = registered(fd), *dev = device(MIB), *b;
  errno = 0;
  IS(cuFileRead(h, dev, len, 10, 0), want);
  if (number) IS(errno, number);
  errno = 0;
  IS(cuFileWrite(h, dev, len, 10, 0), want);
  if (number) IS(errno, number);
  if (number) return;
  Params p = {1, dev, 10, 0, len, h, 0, &fd};
  Event e;
  unsigned n = 1;
  IS(cuFileBatchIOSetUp(&b, 1).err, 0);
  IS(cuFileBatchIOSubmit(b, 1, &p, 0).err, 0);
  IS(cuFileBatchIOGetStatus(b, 1, &n, &e, 0).err, 0);
  IS(e.ret, want);
  IS(e.status, want < 0 ? 0x40 : 0x10);
  CHECK(e.cookie == &fd);
}

/* Every call with a handle of the real library says what that one said. */
static void passed_on(int code) {
  int fd = made(elsewhere, "x", O_RDWR), mine = made(ours, "x", O_RDWR | O_TRUNC);
  void *h = registered(fd), *o = registered(mine), *dev = device(MIB), *b;
  IoVec v = {dev, 100};
  size_t size = 100;
  off_t zero = 0;
  ssize_t bytes = 12345;
  IS(cuFileRead(h, dev, 100, 0, 0), -code);
  IS(cuFileWrite(h, dev, 100, 0, 0), -code);
  IS(cuFileReadv(h, &v, 1, 0, 0), -code);
  Status s = cuFileReadAsync(h, dev, &size, &zero, &zero, &bytes, 0);
  IS(s.err, code);
  IS(s.cu_err, code == 5011 ? 719 : 0);
  IS(bytes, 12345);
  /* Of a batch all entries are refused, ours with theirs. */
  Params p[2] = {{1, dev, 0, 0, 100, o, 1, (void *)1}, {1, dev, 0, 0, 100, h, 0, (void *)2}};
  Event e[2];
  unsigned n = 2;
  IS(cuFileBatchIOSetUp(&b, 2).err, 0);
  IS(cuFileBatchIOSubmit(b, 2, p, 0).err, code);
  IS(cuFileBatchIOGetStatus(b, 1, &n, e, 0).err, 0);
  IS(n, 0);
  struct stat st;
  IS(fstat(mine, &st), 0);
  IS(st.st_size, 0);
  IS(cuFileWrite(o, dev, 100, 0, 0), 100);
}

/* Memory is registered while another thread opens the real library's driver, which looks at what is registered. */
static void *opener(void *fd) { use_device(0); registered(*(int *)fd); return 0; }
static void beside(void) {
  pthread_t t;
  IS(cuFileDriverOpen().err, 0);
  void *dev = device(MIB), *next = device(MIB);
  IS(cuFileBufRegister(dev, MIB, 0).err, 0);
  int fd = made(elsewhere, "beside", O_RDWR);
  IS(pthread_create(&t, 0, opener, &fd), 0);
  while (access(getenv("RECORD"), F_OK)) usleep(1000);
  IS(cuFileBufRegister(next, MIB, 0).err, 0);
  IS(pthread_join(t, 0), 0);
}

/* The real library's driver does not end to open: who needs it hangs, and no call that has nothing to do with its files. */
static void hangs(void) {
  pthread_t t;
  int mine = made(ours, "hangs", O_RDWR), second = made(ours, "hangs too", O_RDWR), fd = made(elsewhere, "hangs", O_RDWR);
  void *h = registered(mine), *dev = device(MIB), *next = device(MIB), *s, *b;
  IS(cuFileBufRegister(dev, MIB, 0).err, 0);
  IS(cuStreamCreate(&s, 1), 0);
  IS(pthread_create(&t, 0, opener, &fd), 0);
  while (access(getenv("RECORD"), F_OK)) usleep(1000);
  char *data = pattern(10, MIB);
  put(dev, data, MIB);
  IS(cuFileWrite(h, dev, MIB, 0, 0), MIB);
  IS(cuFileBufRegister(next, MIB, 0).err, 0);
  IS(cuFileRead(h, next, MIB, 0, 0), MIB);
  CHECK(same(next, data, MIB));
  IS(cuFileBufDeregister(dev).err, 0);
  void *o = registered(second);
  size_t size = 1000;
  off_t zero = 0;
  ssize_t bytes = 0;
  IS(cuFileStreamRegister(s, 0).err, 0);
  IS(cuFileWriteAsync(o, next, &size, &zero, &zero, &bytes, s).err, 0);
  IS(cuStreamSynchronize(s), 0);
  IS(bytes, 1000);
  IS(cuFileStreamDeregister(s).err, 0);
  Params p = {1, next, 0, 0, 5000, o, 0, &fd};
  Event e;
  unsigned n = 1;
  IS(cuFileBatchIOSetUp(&b, 1).err, 0);
  IS(cuFileBatchIOSubmit(b, 1, &p, 0).err, 0);
  IS(cuFileBatchIOGetStatus(b, 1, &n, &e, 0).err, 0);
  IS(e.ret, 1000);
  cuFileBatchIODestroy(b);
  cuFileHandleDeregister(o);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileDriverClose_v2().err, 5006); /* not under who hangs */
}

/* The real library does not tell what has ended: what ended of ours is told all the same. */
static void half(void) {
  int fd = made(elsewhere, "half", O_RDWR), mine = made(ours, "half", O_RDWR);
  void *h = registered(fd), *o = registered(mine), *dev = device(MIB), *b;
  Params p[2] = {{1, dev, 0, 0, 10, h, 0, (void *)1}, {1, dev, 0, 0, 1000, o, 1, (void *)2}};
  Event e[2];
  unsigned n;
  IS(cuFileBatchIOSetUp(&b, 2).err, 0);
  IS(cuFileBatchIOSubmit(b, 2, p, 0).err, 0);
  int err;
  while (n = 2, err = cuFileBatchIOGetStatus(b, 2, &n, e, 0).err) { IS(err, 5030); usleep(1000); }
  IS(n, 1);
  CHECK(e[0].cookie == (void *)2 && e[0].ret == 1000);
  n = 2;
  IS(cuFileBatchIOGetStatus(b, 2, &n, e, 0).err, 5030);
  cuFileBatchIODestroy(b);
}

/* What registering a file of the mount, and of elsewhere, says. */
static void refused(int here, int there) {
  void *h = (void *)5;
  int fd = made(ours, "r", O_RDWR), other = made(elsewhere, "r", O_RDWR);
  IS(try_register(fd, &h), here);
  if (here) IS((long)h, 5);
  IS(try_register(other, &h), there);
}

/* By turns through the mount and through the library, whatever each keeps of the file: no turn sees less than the last one did. It needs metadata servers
 * that ask writers when somebody looks. */
static void turns(void) {
  enum { N = 300000 };
  int fd = made(ours, "turns", O_RDWR), reader = open(name(ours, "turns"), O_RDONLY);
  void *h = registered(fd), *reads = registered(reader), *dev = device(MIB), *other = device(MIB);
  char *back = malloc(MIB);
  struct stat st;
  for (int i = 0; i < 20; i++) {
    size_t n = N + i * 1000;
    char *a = pattern(2 * i, n), *b = pattern(2 * i + 1, n);
    IS(pwrite(fd, a, n, 0), n);
    for (int k = 0; k < 2; k++) { /* the second from what the first has kept */
      IS(cuFileRead(reads, dev, MIB, 0, 0), n);
      CHECK(same(dev, a, n));
    }
    put(other, b, n);
    IS(cuFileWrite(h, other, n, 0, 0), n);
    IS(cuFileRead(reads, dev, MIB, 0, 0), n);
    CHECK(same(dev, b, n));
    IS(pread(reader, back, MIB, 0), n);
    CHECK(!memcmp(back, b, n));
    IS(cuFileWrite(h, other, 500, n, 0), 500);
    IS(stat(name(ours, "turns"), &st), 0);
    IS(st.st_size, n + 500);
    IS(pread(reader, back, MIB, n - 1), 501);
    IS(ftruncate(fd, 1000 + i), 0);
    IS(cuFileRead(reads, dev, MIB, 0, 0), 1000 + i);
    IS(cuFileWrite(h, other, 10, 5000, 0), 10);
    IS(pread(reader, back, MIB, 0), 5010);
    CHECK(!back[1000 + i] && !back[4999] && !memcmp(back + 5000, b, 10));
    IS(ftruncate(fd, 0), 0);
    IS(cuFileRead(h, dev, MIB, 0, 0), 0);
    free(a), free(b);
  }
}

static int cut_fd;
static volatile int enough;
static void *cutter(void *none) {
  for (int i = 0; !enough; i++) IS(ftruncate(cut_fd, i % 2 ? 700000 : 100 + i), 0);
  return none;
}

/* A file that another thread cuts and lengthens all the time: reads are short, never wrong and never errors. */
static void cut(void) {
  pthread_t t;
  cut_fd = made(ours, "cut", O_RDWR);
  void *h = registered(cut_fd), *dev = device(MIB);
  char *data = pattern(9, 100);
  IS(pwrite(cut_fd, data, 100, 0), 100);
  IS(fsync(cut_fd), 0);
  IS(pthread_create(&t, 0, cutter, 0), 0);
  for (int i = 0; i < 100; i++) {
    ssize_t n = cuFileRead(h, dev, MIB, 0, 0);
    CHECK(n >= 100 && n <= 700000);
    CHECK(same(dev, data, 100));
  }
  enough = 1;
  IS(pthread_join(t, 0), 0);
}

/* The tier fails in the middle of a call, and another one goes on. */
static void switched(int save) {
  /* Small slots, so that a call has many parts, wherever this runs. */
  struct rlimit few;
  IS(getrlimit(RLIMIT_MEMLOCK, &few), 0);
  if (few.rlim_max < 8 * MIB) { puts("skipped: less than 8 MiB can be locked"); return; }
  few.rlim_cur = 8 * MIB;
  IS(setrlimit(RLIMIT_MEMLOCK, &few), 0);
  strake_standin_set(13, 50000); /* so that pinned memory is the faster one */
  size_t n = 8 * MIB;
  int fd = made(ours, "sw", O_RDWR);
  void *h = registered(fd), *dev = device(n);
  char *data = pattern(3, n);
  put(dev, data, n);
  IS(cuFileWrite(h, dev, n, 0, 0), n);
  char *none = calloc(1, n);
  put(dev, none, n);
  static uint64_t l[5112 / 8];
  IS(cuFileSetStatsLevel(3).err, 0);
  IS(cuFileStatsStart().err, 0);
  if (save) { put(dev, data, n); IS(ftruncate(fd, 0), 0); }
  strake_standin_set(13, 0);
  strake_standin_set(12, 3);
  IS(save ? cuFileWrite(h, dev, n, 0, 0) : cuFileRead(h, dev, n, 0, 0), n);
  strake_standin_set(12, -1);
  if (save) IS(pread(fd, none, n, 0), n);
  CHECK(save ? !memcmp(none, data, n) : same(dev, data, n));
  /* NVIDIA's counters: all bytes, by neither of its direct paths. */
  IS(cuFileGetStatsL3(l).err, 0);
  IS(l[12], save ? 0 : n); IS(l[13], save ? n : 0);
  uint64_t *g = l + 1144 / 8;
  IS(g[save ? 15 : 2], n); IS(g[save ? 19 : 6], 1); IS(g[save ? 20 : 7], 0); IS(g[save ? 21 : 8], 0); IS(g[save ? 22 : 9], 1);
  IS(cuFileDriverClose_v2().err, 0);
}

static void policy(void) {
  int fd = made(ours, "p", O_RDWR);
  void *h = registered(fd), *dev = device(MIB);
  char host[100] = "host";
  IS(cuFileWrite(h, dev, 100, 0, 0), -5008);
  IS(cuFileWrite(h, host, 100, 0, 0), 100);
  IS(cuFileRead(h, dev, 100, 0, 0), -5008);
}

/* A file that its user may not open. */
static void permission(void) {
  int fd = made(ours, "root", O_RDWR);
  IS(fchmod(fd, 0600), 0);
  void *h;
  registered(made(ours, "any", O_RDWR)); /* connected, with the key that root may read */
  CHECK(!setegid(65534) && !seteuid(65534));
  IS(try_register(fd, &h), 5025);
  CHECK(!seteuid(0) && !setegid(0));
  IS(try_register(fd, &h), 0);
}

/* The real library, as far as it goes without a GPU: reads and writes of a file elsewhere through host memory. */
static void real(void) {
  int version = 0, fd = made(elsewhere, "real", O_RDWR);
  char *data = pattern(8, MIB), *back = malloc(MIB);
  IS(pwrite(fd, data, MIB, 0), MIB);
  IS(cuFileDriverOpen().err, 0);
  IS(cuFileGetVersion(&version).err, 0);
  void *h;
  int e = try_register(fd, &h);
  printf("register: %d\n", e);
  if (!e) {
    ssize_t n = cuFileRead(h, back, 4096, 4096, 0);
    printf("read: %zd errno %d %s\n", n, n < 0 ? errno : 0, n > 0 && !memcmp(back, data + 4096, n) ? "same" : "-");
    CHECK(n <= 4096);
    cuFileHandleDeregister(h);
  }
  printf("close: %d\n", cuFileDriverClose_v2().err);
}

int main(int n, char **arg) {
  CHECK(n >= 4);
  setvbuf(stdout, 0, _IONBF, 0);
  ours = arg[2], elsewhere = arg[3];
  use_device(0);
  const char *what = arg[1];
  alarm(100);
  if (!strcmp(what, "io")) io();
  else if (!strcmp(what, "errors")) errors();
  else if (!strcmp(what, "gone")) gone();
  else if (!strcmp(what, "streams")) streams();
  else if (!strcmp(what, "told-in-streams")) told_in_streams();
  else if (!strcmp(what, "gone-in-stream")) gone_in_stream();
  else if (!strcmp(what, "batches")) batches();
  else if (!strcmp(what, "forks")) forks();
  else if (!strcmp(what, "statistics")) statistics();
  else if (!strcmp(what, "foreign")) foreign(1);
  else if (!strcmp(what, "one-foreign")) one_foreign(atol(arg[4]), atoi(arg[5]), atol(arg[6]), atol(arg[7]));
  else if (!strcmp(what, "passed-on")) passed_on(atoi(arg[4]));
  else if (!strcmp(what, "early-fork")) early_fork();
  else if (!strcmp(what, "old-statistics")) old_statistics();
  else if (!strcmp(what, "beside")) beside();
  else if (!strcmp(what, "half")) half();
  else if (!strcmp(what, "hangs")) hangs();
  else if (!strcmp(what, "refused")) refused(atoi(arg[4]), atoi(arg[5]));
  else if (!strcmp(what, "turns")) turns();
  else if (!strcmp(what, "cut")) cut();
  else if (!strcmp(what, "policy")) policy();
  else if (!strcmp(what, "switched")) switched(!strcmp(arg[4], "save"));
  else if (!strcmp(what, "permission")) permission();
  else if (!strcmp(what, "real")) real();
  else return 2;
  return 0;
}
