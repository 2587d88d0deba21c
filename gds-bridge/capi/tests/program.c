/* A program in C over the library: what a user would write. Arguments: metadata servers, key file.
 * Ends with 0 if everything was as it should; otherwise with a line on stderr. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "strakegds.h"

#define CHECK(what) do { if (!(what)) { \
  fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strakegds_error()); exit(1); } } while (0)

_Static_assert(sizeof(struct strakegds_options) == 88 && offsetof(struct strakegds_options, policy) == 80 && offsetof(struct strakegds_options, local) == 72 && offsetof(struct strakegds_options, verify_on_gpu) == 64, "options");
_Static_assert(sizeof(struct strakegds_range) == 32 && offsetof(struct strakegds_range, length) == 24, "range");
_Static_assert(sizeof(struct strakegds_report) == 96 && offsetof(struct strakegds_report, seconds) == 88, "report");

#define LEN 3000017

static void refuses(int got, int want, const char *word) {
  if (got == -want && strstr(strakegds_error(), word)) return;
  fprintf(stderr, "%d (wanted %d), '%s' has no '%s'\n", got, -want, strakegds_error(), word);
  exit(1);
}

static uint64_t sum(const struct strakegds_report *r) {
  uint64_t all = 0;
  for (int i = 0; i < STRAKEGDS_TIERS; i++) all += r->by_tier[i];
  return all;
}

int main(int n, char **arg) {
  CHECK(n == 3 && strakegds_abi() == STRAKEGDS_ABI);
  struct strakegds_options o = {.size = sizeof o, .mds = arg[1], .client_key = arg[2], .memory = "host", .fabric = "tcp",
                                .pinned_limit = 2 << 20, .workers = 2, .slots = 2, .slot_bytes = 256 << 10};
  struct strakegds *b = NULL;

  /* Setups that cannot be. */
  struct strakegds_options bad = o;
  bad.size = 8;
  refuses(strakegds_open(&bad, &b), EINVAL, "size is 8");
  bad = o, bad.reserved = 1;
  refuses(strakegds_open(&bad, &b), EINVAL, "reserved is 1");
  bad = o, bad.mds = NULL;
  refuses(strakegds_open(&bad, &b), EINVAL, "mds is NULL");
  bad = o, bad.memory = "gpu";
  refuses(strakegds_open(&bad, &b), EINVAL, "not a memory");
  bad = o, bad.fabric = "ether";
  refuses(strakegds_open(&bad, &b), EINVAL, "'ether'");
  bad = o, bad.policy = "best";
  refuses(strakegds_open(&bad, &b), EINVAL, "`best`");
  bad = o, bad.client_key = "/none";
  refuses(strakegds_open(&bad, &b), ENOENT, "/none");
  bad = o, bad.memory = "cuda:99"; /* no driver, or no such GPU */
  CHECK(strakegds_open(&bad, &b) == -ENODEV && *strakegds_error() && !b);
  refuses(strakegds_open(NULL, &b), EINVAL, "options is NULL");
  refuses(strakegds_open(&o, NULL), EINVAL, "bridge is NULL");

  /* A program of version 2, whose options end before `local`: what lies there is not read. */
  o.local = (const char *)1;
  o.size = offsetof(struct strakegds_options, local);
  CHECK(strakegds_open(&o, &b) == 0 && !*strakegds_error());
  const char *tiers = strakegds_tiers(b);
  CHECK(tiers && strstr(tiers, "\"bounce-tcp\"") && strstr(tiers, "host memory in place of a device"));
  int pinned = strstr(tiers, "not-pinned") == NULL;
  const char *policy = pinned ? "require:bounce-tcp" : "require:pageable";
  enum strakegds_tier tier = pinned ? STRAKEGDS_BOUNCE_TCP : STRAKEGDS_PAGEABLE;
  printf("by %s\n", policy);

  /* A checkpoint: one tensor in two files, saved in one call. */
  char *data = malloc(LEN), *back = malloc(LEN);
  for (size_t i = 0; i < LEN; i++) data[i] = (char)(i * 2654435761u >> 13);
  uint64_t tensor, other;
  CHECK(strakegds_alloc(b, LEN, &tensor) == 0 && strakegds_alloc(b, LEN, &other) == 0);
  CHECK(strakegds_put(b, tensor, data, LEN) == 0 && strakegds_settle(b) == 0);
  struct strakegds_file *f[2];
  CHECK(strakegds_file_open(b, "/one", O_RDWR | O_CREAT | O_EXCL, 0644, &f[0]) == 0);
  CHECK(strakegds_file_open(b, "/two", O_RDWR | O_CREAT | O_EXCL, 0644, &f[1]) == 0);
  struct strakegds_range r[2] = {{f[0], 7, tensor, 1000000}, {f[1], 0, tensor + 1000000, LEN - 1000000}};
  struct strakegds_report rep = {.size = sizeof rep};
  CHECK(*strakegds_report_json() == 0);
  CHECK(strakegds_save(b, r, 2, policy, &rep) == 0);
  CHECK(rep.asked == LEN && rep.moved == LEN && rep.by_tier[tier] == LEN && sum(&rep) == LEN && rep.switches == 0);
  CHECK(rep.checksum == STRAKEGDS_CHECKSUM_AT_CLIENT && rep.seconds > 0);
  CHECK(strstr(strakegds_report_json(), "\"direction\":\"save\"") && strstr(strakegds_report_json(), "\"ranges\":[1000000,2000017]"));
  uint64_t size = 0;
  for (int i = 0; i < 2; i++) CHECK(strakegds_file_sync(f[i]) == 0);
  CHECK(strakegds_file_size(f[0], &size) == 0 && size == 1000007);

  /* And back, into other memory. */
  r[0].address = other, r[1].address = other + 1000000;
  CHECK(strakegds_load(b, r, 2, NULL, &rep) == 0 && rep.moved == LEN && sum(&rep) == LEN);
  CHECK(strakegds_get(b, back, other, LEN) == 0 && memcmp(data, back, LEN) == 0);
  CHECK(strakegds_load(b, NULL, 0, NULL, NULL) == 0);

  /* The same in the order of a stream. */
  struct strakegds_call *call = NULL;
  memset(back, 0, LEN);
  CHECK(strakegds_put(b, other, back, LEN) == 0);
  CHECK(strakegds_start_load(b, r, 2, NULL, NULL, &call) == 0 && call && strakegds_is_done(call) >= 0);
  rep.size = 8;
  refuses(strakegds_finish(call, &rep), EINVAL, "size is 8");
  rep.size = sizeof rep;
  CHECK(strakegds_finish(call, &rep) == 0 && rep.moved == LEN && sum(&rep) == LEN);
  CHECK(strstr(strakegds_report_json(), "\"direction\":\"load\""));
  CHECK(strakegds_get(b, back, other, LEN) == 0 && memcmp(data, back, LEN) == 0);
  CHECK(strakegds_start_save(b, r, 2, policy, NULL, &call) == 0 && strakegds_finish(call, NULL) == 0);
  CHECK(strakegds_start_load(b, r, 2, "require:gpu-rdma", NULL, &call) == 0);
  refuses(strakegds_finish(call, &rep), EOPNOTSUPP, "gpu-rdma");
  CHECK(rep.moved == 0);
  refuses(strakegds_start_load(b, r, 2, "best", NULL, &call), EINVAL, "`best`");
  refuses(strakegds_start_load(b, r, 2, NULL, NULL, NULL), EINVAL, "call is NULL");
  refuses(strakegds_start_load(b, NULL, 2, NULL, NULL, &call), EINVAL, "ranges is NULL");
  refuses(strakegds_finish(NULL, &rep), EINVAL, "call is NULL");
  refuses(strakegds_is_done(NULL), EINVAL, "call is NULL");

  /* What cannot be: nothing moves, and the report says so. */
  r[1].length++;
  refuses(strakegds_load(b, r, 2, NULL, &rep), EINVAL, "range 1");
  CHECK(rep.moved == 0 && rep.asked == LEN + 1);
  r[1].length--, r[1].address = 4096;
  refuses(strakegds_load(b, r, 2, NULL, &rep), EINVAL, "0x1000");
  r[1].address = other;
  refuses(strakegds_load(b, r, 2, NULL, &rep), EINVAL, "overlaps");
  r[1].address = other + 1000000;
  refuses(strakegds_load(b, r, 2, "best", &rep), EINVAL, "`best`");
  refuses(strakegds_load(b, r, 2, "require:gpu-rdma", &rep), EOPNOTSUPP, "gpu-rdma");
  CHECK(rep.moved == 0);
  refuses(strakegds_load(b, NULL, 2, NULL, &rep), EINVAL, "ranges is NULL");
  refuses(strakegds_load(NULL, r, 2, NULL, &rep), EINVAL, "bridge is NULL");
  rep.size = 8;
  refuses(strakegds_load(b, r, 2, NULL, &rep), EINVAL, "size is 8");
  rep.size = sizeof rep;
  struct strakegds_file *none = r[0].file;
  r[0].file = NULL;
  refuses(strakegds_load(b, r, 2, NULL, &rep), EINVAL, "range 0: file is NULL");
  r[0].file = none;
  r[1].offset = 1000; /* the file ends before */
  refuses(strakegds_load(b, r, 2, NULL, &rep), EIO, "the file ends after");
  CHECK(rep.moved == sum(&rep) && rep.moved < LEN);
  CHECK(strakegds_free(b, other) == 0);
  refuses(strakegds_load(b, r, 1, NULL, &rep), EINVAL, "freed");
  refuses(strakegds_free(b, other), EINVAL, "freed");
  refuses(strakegds_file_open(b, "/none", O_RDONLY, 0, &none), ENOENT, "/none");
  refuses(strakegds_file_open(b, "/one", O_CREAT | O_EXCL | O_RDWR, 0644, &none), EEXIST, "/one");
  refuses(strakegds_file_open(b, NULL, O_RDONLY, 0, &none), EINVAL, "path is NULL");
  CHECK(strakegds_file_open(b, "/one", O_RDONLY, 0, &none) == 0);
  r[0] = (struct strakegds_range){none, 0, tensor, 10};
  refuses(strakegds_save(b, r, 1, NULL, &rep), EBADF, "writing");
  CHECK(strakegds_file_close(none) == 0);

  /* A handle with a policy of its own: every call that moves bytes of it meets it, too, and no other. */
  uint64_t unused = tensor + 2000000; /* what is there is not asked for below */
  r[0] = (struct strakegds_range){f[0], 0, unused, 10}, r[1] = (struct strakegds_range){f[1], 0, unused + 10, 10};
  CHECK(strakegds_file_policy(f[0], "require:gpu-rdma") == 0);
  refuses(strakegds_load(b, r, 2, NULL, &rep), EOPNOTSUPP, "require:gpu-rdma");
  CHECK(rep.moved == 0 && strstr(strakegds_report_json(), "\"policy\":\"require:gpu-rdma\""));
  refuses(strakegds_load(b, r, 2, policy, &rep), EINVAL, "no tier meets both");
  CHECK(rep.asked == 20 && rep.moved == 0);
  CHECK(strakegds_load(b, r + 1, 1, policy, &rep) == 0 && rep.moved == 10);
  refuses(strakegds_file_policy(f[0], "best"), EINVAL, "`best`");
  refuses(strakegds_file_policy(NULL, "prefer"), EINVAL, "file is NULL");
  CHECK(strakegds_file_policy(f[0], policy) == 0 && strakegds_load(b, r, 2, NULL, &rep) == 0 && rep.by_tier[tier] == 20);
  CHECK(strakegds_file_policy(f[0], NULL) == 0);

  /* A file of another bridge, whose own policy nothing here meets. */
  struct strakegds *second;
  o.local = NULL, o.policy = "require:gpu-rdma", o.size = sizeof o;
  CHECK(strakegds_open(&o, &second) == 0);
  refuses(strakegds_load(second, r, 1, NULL, &rep), EINVAL, "another bridge");
  struct strakegds_file *strict;
  CHECK(strakegds_file_open(second, "/one", O_RDONLY, 0, &strict) == 0);
  uint64_t there;
  CHECK(strakegds_alloc(second, 10, &there) == 0);
  r[0] = (struct strakegds_range){strict, 0, there, 10};
  refuses(strakegds_load(second, r, 1, NULL, &rep), EOPNOTSUPP, "require:gpu-rdma");
  refuses(strakegds_load(second, r, 1, policy, &rep), EINVAL, "that of the bridge");
  r[0].file = NULL;
  refuses(strakegds_replace(second, "/never", 0644, r, 1, NULL, &rep), EOPNOTSUPP, "require:gpu-rdma");
  CHECK(strakegds_free(second, there) == 0 && strakegds_file_close(strict) == 0);
  strakegds_close(second);
  r[0] = (struct strakegds_range){f[0], 0, tensor, 10};

  /* A child has nothing of it. */
  pid_t child = fork();
  if (child == 0) {
    int code = strakegds_load(b, r, 1, NULL, &rep);
    strakegds_close(b);
    _exit(code == -EINVAL && strlen(strakegds_error()) == 0 ? 42 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 42);

  /* A whole file in place of another. */
  struct strakegds_range whole[2] = {{NULL, 0, tensor, 5}, {NULL, 0, tensor + 100, 1000000}};
  CHECK(strakegds_replace(b, "/two", 0600, whole, 2, policy, &rep) == 0 && rep.by_tier[tier] == 1000005);
  CHECK(strakegds_rename(b, "/one", "/three") == 0);
  refuses(strakegds_rename(b, "/one", "/four"), ENOENT, "");
  CHECK(strakegds_file_close(f[0]) == 0 && strakegds_file_close(f[1]) == 0 && strakegds_file_close(NULL) == 0);
  strakegds_close(b);
  strakegds_close(NULL);
  free(data);
  free(back);
  return 0;
}
