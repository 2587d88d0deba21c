/* Checksums on the device, as a program in C asks for them. Arguments: metadata servers, key file, memory.
 * Ends with 0 if everything was as it should; otherwise with a line on stderr. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strakegds.h"

#define CHECK(what) do { if (!(what)) { \
  fprintf(stderr, "line %d: %s: %s %s\n", __LINE__, #what, strakegds_error(), strakegds_report_json()); exit(1); } } while (0)

#define LEN 1000003

int main(int n, char **arg) {
  CHECK(n == 4);
  int gpu = strcmp(arg[3], "host") != 0;
  struct strakegds_options o = {.size = sizeof o, .mds = arg[1], .client_key = arg[2], .memory = arg[3], .fabric = "tcp",
                                .pinned_limit = 2 << 20, .workers = 2, .slots = 2, .slot_bytes = 256 << 10};
  char *data = malloc(LEN), *back = malloc(LEN);
  for (size_t i = 0; i < LEN; i++) data[i] = (char)(i * 2654435761u >> 13);

  /* Not asked for; asked for; and by a program of version 1, whose options end before the question: what lies there is not read. */
  for (int asked = 0; asked < 3; asked++) {
    o.verify_on_gpu = asked > 0;
    o.local = asked > 0 ? "/none" : NULL;
    o.size = asked == 2 ? offsetof(struct strakegds_options, verify_on_gpu) : sizeof o;
    struct strakegds *b;
    CHECK(strakegds_open(&o, &b) == 0);
    /* Copies on this node: the folder was named. Whether something is in it is known when a file is loaded. */
    CHECK((strstr(strakegds_tiers(b), "no folder with copies") != NULL) == (asked != 1));
    uint64_t tensor;
    CHECK(strakegds_alloc(b, LEN, &tensor) == 0 && strakegds_put(b, tensor, data, LEN) == 0);
    struct strakegds_file *f;
    CHECK(strakegds_file_open(b, "/verified", O_RDWR | O_CREAT, 0644, &f) == 0);
    struct strakegds_range r = {f, 0, tensor, LEN};
    struct strakegds_report rep[2] = {{.size = sizeof *rep}, {.size = sizeof *rep}};
    CHECK(strakegds_save(b, &r, 1, NULL, &rep[0]) == 0);
    memset(back, 0, LEN);
    CHECK(strakegds_put(b, tensor, back, LEN) == 0);
    CHECK(strakegds_load(b, &r, 1, NULL, &rep[1]) == 0);
    CHECK(strakegds_get(b, back, tensor, LEN) == 0 && memcmp(data, back, LEN) == 0);
    int on_gpu = asked == 1 && gpu;
    uint32_t want = on_gpu ? STRAKEGDS_CHECKSUM_ON_GPU : STRAKEGDS_CHECKSUM_AT_CLIENT;
    CHECK(rep[0].checksum == want && rep[1].checksum == want);
    CHECK(strstr(strakegds_report_json(), on_gpu ? "\"checksums\":\"gpu\"" : "\"checksums\":\"host\""));
    const char *why = on_gpu ? "\"not_on_gpu\":null" : asked == 1 ? "there is no GPU" : "it was not requested";
    CHECK(strstr(strakegds_report_json(), why));
    CHECK(strakegds_file_close(f) == 0 && strakegds_free(b, tensor) == 0);
    strakegds_close(b);
  }
  if (gpu) {
    /* A tier fails in the middle of a call: the report has the bytes of both. Pinned memory is the faster one until then. */
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(cuda);
    void (*set)(int, long) = (void (*)(int, long))dlsym(cuda, "strake_standin_set");
    CHECK(set);
    set(13, 50000);
    o.verify_on_gpu = 0, o.local = NULL, o.size = sizeof o;
    struct strakegds *b;
    struct strakegds_file *f;
    uint64_t tensor;
    CHECK(strakegds_open(&o, &b) == 0 && strakegds_file_open(b, "/verified", O_RDONLY, 0, &f) == 0);
    CHECK(strakegds_alloc(b, LEN, &tensor) == 0);
    struct strakegds_range r = {f, 0, tensor, LEN};
    struct strakegds_report rep = {.size = sizeof rep};
    set(13, 0);
    set(12, 2);
    CHECK(strakegds_load(b, &r, 1, NULL, &rep) == 0);
    set(12, -1);
    CHECK(strakegds_get(b, back, tensor, LEN) == 0 && memcmp(data, back, LEN) == 0);
    uint64_t sum = 0, bounced = rep.by_tier[STRAKEGDS_BOUNCE_TCP], pageable = rep.by_tier[STRAKEGDS_PAGEABLE];
    for (int i = 0; i < STRAKEGDS_TIERS; i++) sum += rep.by_tier[i];
    CHECK(sum == LEN && rep.moved == LEN && bounced && pageable && bounced + pageable == LEN && rep.switches == 1);
    char want[100];
    snprintf(want, sizeof want, "\"bounce-tcp\":%llu,\"pageable\":%llu", (unsigned long long)bounced, (unsigned long long)pageable);
    CHECK(strstr(strakegds_report_json(), want));
    CHECK(strakegds_file_close(f) == 0 && strakegds_free(b, tensor) == 0);
    strakegds_close(b);
  }
  free(data);
  free(back);
  return 0;
}
