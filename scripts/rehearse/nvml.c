// A pretended NVML beside driver.c: one kind of card, nobody else on it, its memory as the driver
// counts it.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define NOT_SUPPORTED 3
typedef unsigned long long ull;

extern int cudaMemGetInfo(size_t *, size_t *);
extern int cudaDeviceGetAttribute(int *, int, int);
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return e == 3 ? "Not Supported" : "pretended"; }
int nvmlDeviceGetCount_v2(unsigned *n) {
  const char *e = getenv("PRETENDED_GPUS");
  *n = e ? atoi(e) : 1;
  return 0;
}
int nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
  *h = (void *)(size_t)(i + 1);
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *b, void **h) {
  *h = (void *)1;
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *u, void **h) {
  *h = (void *)1;
  return 0;
}
int nvmlDeviceGetName(void *d, char *b, unsigned n) {
  snprintf(b, n, "%s",
           getenv("PRETENDED_NAME") ? getenv("PRETENDED_NAME") : "NVIDIA GeForce RTX 3060");
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, ull *m) {
  size_t f, t;
  int (*g)(size_t *, size_t *) = dlsym(RTLD_DEFAULT, "cudaMemGetInfo");
  g(&f, &t);
  m[0] = t;
  m[1] = f;
  m[2] = t - f;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) {
  const char *e = getenv("PRETENDED_CAPABILITY");
  *a = 8;
  *b = 6;
  if (e)
    sscanf(e, "%d.%d", a, b);
  return 0;
}
int nvmlDeviceGetUUID(void *d, char *b, unsigned n) {
  snprintf(b, n, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10");
  return 0;
}
int nvmlSystemGetDriverVersion(char *b, unsigned n) {
  snprintf(b, n, "580.95.05");
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *v) {
  *v = 13000;
  return 0;
}
int nvmlSystemGetCudaDriverVersion(int *v) {
  *v = 13000;
  return 0;
}
int nvmlDeviceGetDisplayActive(void *d, int *a) {
  *a = 0;
  return 0;
}
int nvmlDeviceGetMigMode(void *d, unsigned *a, unsigned *b) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned l, int *t) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned l, void *p) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *p) {
  *n = 0;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *p) {
  *n = 0;
  return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *n, void *p) {
  *n = 0;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *d, void *i) {
  if (getenv("PRETENDED_FABRIC_FAIL"))
    return 3;
  unsigned v = *(unsigned *)i;
  memset((char *)i + 4, 0, 24);
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *d, unsigned *u) {
  u[0] = 97;
  u[1] = 50;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *d, unsigned *p) {
  *p = 165000;
  return 0;
}
int nvmlDeviceGetTemperature(void *d, int s, unsigned *t) {
  *t = 64;
  return 0;
}
int nvmlDeviceGetClockInfo(void *d, int t, unsigned *c) {
  *c = 1800;
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, ull *r) {
  *r = 0;
  return 0;
}
int nvmlDeviceGetProcessUtilization(void *d, void *u, unsigned *n, ull t) { return NOT_SUPPORTED; }
