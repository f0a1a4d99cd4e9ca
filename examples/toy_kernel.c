/* Speaks `--runner exec`; per_slot decodes weights slot by slot, decode_first all of them. cc -O3 toy_kernel.c -lm */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
static char line[65536], arm[4096], file[4096], *at; static int id[1 << 22], first; static long n, k, h, experts;
static unsigned char code[1 << 20]; static float book[256], plane[1 << 20], x[1 << 18], y[1 << 18];
static long field(const char *key) { return (at = strstr(line, key)) ? atol(at + strlen(key)) : 0; }
static double now(void) { struct timespec t; timespec_get(&t, TIME_UTC); return t.tv_sec + 1e-9 * t.tv_nsec; }
static void chain(long layers) { /* y[t] = x[t] summed over W[its experts]; then x = y, so that layers depend */
  for (const int *e = id; e < id + layers * n * k; e += n * k, memcpy(x, y, sizeof *x * n * h)) {
    memset(y, 0, sizeof *y * n * h);
    for (long i = 0; first && i < experts * h * h; i++) plane[i] = book[code[i]];
    for (long s = 0; s < n * k; s++) for (long j = 0, w = e[s] * h * h, t = s / k * h; j < h; j++, w += h)
      for (long i = 0; i < h; i++) y[t + i] += (first ? plane[w + i] : book[code[w + i]]) * x[t + j]; } }
static double parity(void) { /* relative error of the first token after one layer, against a sum in double */
  double *sum = calloc(h, sizeof *sum), off = 0, all = 0;
  for (long s = 0; s < k; s++) for (long j = 0; j < h; j++) for (long i = 0; i < h; i++)
    sum[i] += (double)book[code[(id[s] * h + j) * h + i]] * x[j];
  chain(1); for (long i = 0; i < h; i++) off += pow(sum[i] - y[i], 2), all += pow(sum[i], 2);
  free(sum); return sqrt(off / all); }
int main(void) {
  for (int i = 0; i < 1 << 20; i++) code[i] = i * 2654435761u >> 24, book[i % 256] = (i % 256 - 127.5f) / 2400;
  for (; fgets(line, sizeof line, stdin); fflush(stdout)) {
    sscanf(strstr(line, "\"arm\": "), "\"arm\": \"%4095[^\"]", arm); first = strstr(line, "\"decode_first\"") != 0;
    n = field("\"tokens\": "), k = field("\"top_k\": "), h = field("\"hidden\": "), experts = field("\"experts\": ");
    if (n < 1) { printf("{\"arm\": \"%s\", \"paths\": [\"per_slot\", \"decode_first\"]}\n", arm); continue; }
    long lo = field("\"chain\": ["), hi = atol(strchr(at, ',') + 1);
    sscanf(strstr(line, "\"ids_file\": "), "\"ids_file\": \"%4095[^\"]", file);
    FILE *f = fopen(file, "rb"); if (!f || !fread(id, 4 * hi * n * k, 1, f) || fclose(f)) return 1;
    for (long i = 0; i < n * h; i++) x[i] = i * 40503u % 1000 / 500.0f - 1;
    double rms = parity(), t0 = now(), t1 = (chain(lo), now()), t2 = (chain(hi), now());
    printf("{\"arm\": \"%s\", \"signature\": \"toy %s\", \"parity_rms\": %g, \"short_s\": %.9f, \"long_s\": %.9f}\n",
      arm, first ? "decode_first" : "per_slot", rms, t1 - t0, t2 - t1); } }
