// A pretended CUDA runtime and driver: memory is address space, copies of small blocks are real,
// kernels do nothing.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// ---- what is counted: card.py reads the names here

typedef struct {
  long launches, gemms, h2d, h2d_bytes, d2h, d2h_bytes, d2d, h2d_pageable, h2d_pageable_bytes,
      d2h_pageable, sync_copies, stream_sync, event_sync, dev_sync, event_rec, stream_wait, mallocs,
      frees, hostallocs, hostfrees, memgetinfo, memsets, kernels_side, event_query;
  long used, peak_used, pinned, peak_pinned, registered;
} Counts;
static Counts counted;
Counts *pretended_counts(void) { return &counted; }

// ---- the card: PRETENDED_* of the environment, written by card.py

static size_t memory_bytes = 0, context_bytes = 350UL << 20;
static int capability_major = 8, capability_minor = 6, multiprocessors = 28, devices = 1;
static int traced = 0; // 1: each wait is printed, 2: each copy too
static long pinned_limit_bytes = -1;
static __thread int current_device = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *asked(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value ? value : otherwise;
}

__attribute__((constructor)) static void init(void) {
  if (memory_bytes)
    return;
  memory_bytes = (size_t)(atof(asked("PRETENDED_VRAM_GIB", "24")) * (1UL << 30));
  sscanf(asked("PRETENDED_CAPABILITY", "8.6"), "%d.%d", &capability_major, &capability_minor);
  multiprocessors = atoi(asked("PRETENDED_MULTIPROCESSORS", "28"));
  devices = atoi(asked("PRETENDED_GPUS", "1"));
  traced = atoi(asked("PRETENDED_TRACE", "0"));
  if (getenv("PRETENDED_PINNED_MIB"))
    pinned_limit_bytes = atol(getenv("PRETENDED_PINNED_MIB")) << 20;
  counted.used = counted.peak_used = context_bytes;
}

// ---- memory: address space that nobody commits, since kernels write nothing

#define RANGES 65536
typedef struct {
  uintptr_t start;
  size_t bytes;
} Range;
typedef struct {
  Range ranges[RANGES];
  int count;
} Ranges;
static Ranges on_device, pinned;

static int holds(const Ranges *known, const void *pointer) {
  uintptr_t at = (uintptr_t)pointer;
  for (int i = known->count - 1; i >= 0; i--)
    if (at - known->ranges[i].start < known->ranges[i].bytes)
      return 1;
  return 0;
}

static void add(Ranges *known, void *pointer, size_t bytes) {
  int free = 0;
  while (free < known->count && known->ranges[free].bytes)
    free++;
  if (free == RANGES) {
    fprintf(stderr, "the pretended card has no room for another range of memory\n");
    abort();
  }
  known->ranges[free] = (Range){(uintptr_t)pointer, bytes};
  if (free == known->count)
    known->count++;
}

static size_t forget(Ranges *known, const void *pointer) {
  for (int i = 0; i < known->count; i++)
    if (known->ranges[i].bytes && known->ranges[i].start == (uintptr_t)pointer) {
      size_t bytes = known->ranges[i].bytes;
      known->ranges[i].bytes = 0;
      while (known->count && !known->ranges[known->count - 1].bytes)
        known->count--;
      return bytes;
    }
  return 0;
}

static void *address_space(size_t bytes) {
  return mmap(0, bytes ? bytes : 4096, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static __thread cudaError_t last = 0;
static cudaError_t fail(cudaError_t error) {
  last = error;
  return error;
}

static int take(size_t bytes) {
  if (counted.used + bytes > memory_bytes)
    return 0;
  counted.used += bytes;
  if (counted.used > counted.peak_used)
    counted.peak_used = counted.used;
  return 1;
}

static int pin(size_t bytes) {
  if (pinned_limit_bytes >= 0 && counted.pinned + (long)bytes > pinned_limit_bytes)
    return 0;
  counted.pinned += bytes;
  if (counted.pinned > counted.peak_pinned)
    counted.peak_pinned = counted.pinned;
  return 1;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  // As the driver does: pages of 2 MiB, smaller ones below 1 MiB.
  size_t page = bytes < 1 << 20 ? 4096 : 2 << 20;
  bytes = (bytes + page - 1) / page * page;
  pthread_mutex_lock(&lock);
  counted.mallocs++;
  int fits = take(bytes);
  if (fits) {
    *p = address_space(bytes);
    add(&on_device, *p, bytes);
  }
  pthread_mutex_unlock(&lock);
  return fits ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *p) {
  pthread_mutex_lock(&lock);
  counted.frees++;
  size_t bytes = p ? forget(&on_device, p) : 0;
  counted.used -= bytes;
  if (bytes)
    munmap(p, bytes);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

// Managed memory is bitsandbytes' for its paged optimizers: it may lie on either side and is not
// counted.
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags) {
  *p = address_space(bytes);
  return cudaSuccess;
}
cudaError_t cudaMemPrefetchAsync(const void *p, size_t n, struct cudaMemLocation l, unsigned f,
                                 cudaStream_t s) {
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  pthread_mutex_lock(&lock);
  counted.hostallocs++;
  int fits = pin(bytes);
  if (fits) {
    *p = address_space(bytes);
    add(&pinned, *p, bytes);
  }
  pthread_mutex_unlock(&lock);
  return fits ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *p) {
  pthread_mutex_lock(&lock);
  counted.hostfrees++;
  size_t bytes = forget(&pinned, p);
  counted.pinned -= bytes;
  munmap(p, bytes ? bytes : 4096);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
  pthread_mutex_lock(&lock);
  int fits = pin(bytes);
  if (fits) {
    counted.registered += bytes;
    add(&pinned, p, bytes);
  }
  pthread_mutex_unlock(&lock);
  return fits ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *p) {
  pthread_mutex_lock(&lock);
  size_t bytes = forget(&pinned, p);
  counted.registered -= bytes;
  counted.pinned -= bytes;
  pthread_mutex_unlock(&lock);
  return bytes ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  init();
  counted.memgetinfo++;
  *total = memory_bytes;
  *free = memory_bytes - counted.used;
  return cudaSuccess;
}

// ---- copies: those of at most 64 KiB are real, so that what the host wrote comes back; no kernel
// changes it meanwhile

#define REAL_BYTES 65536

// Fills host memory with zeros, which takes none of it: whole pages are given back to the system.
static void clear(void *to, size_t bytes) {
  uintptr_t page = 4096, start = (uintptr_t)to, end = start + bytes;
  uintptr_t first = (start + page - 1) / page * page, last_end = end / page * page;
  if (first >= last_end || madvise((void *)first, last_end - first, MADV_DONTNEED)) {
    memset(to, 0, bytes);
    return;
  }
  memset(to, 0, first - start);
  memset((void *)last_end, 0, end - last_end);
}

static void copy(void *to, const void *from, size_t bytes) {
  int to_device = holds(&on_device, to), from_device = holds(&on_device, from);
  counted.d2d += to_device && from_device;
  if (to_device && !from_device) {
    int pageable = !holds(&pinned, from);
    counted.h2d++;
    counted.h2d_bytes += bytes;
    counted.h2d_pageable += pageable;
    counted.h2d_pageable_bytes += pageable ? bytes : 0;
    if (traced > 1)
      fprintf(stderr, "[copy] to the card, %zu bytes%s\n", bytes, pageable ? ", pageable" : "");
  }
  if (!to_device && from_device) {
    int pageable = !holds(&pinned, to);
    counted.d2h++;
    counted.d2h_bytes += bytes;
    counted.d2h_pageable += pageable;
    if (traced > 1)
      fprintf(stderr, "[copy] from the card, %zu bytes%s\n", bytes, pageable ? ", pageable" : "");
  }
  if (bytes <= REAL_BYTES)
    memcpy(to, from, bytes);
  else if (from_device && !to_device)
    clear(to, bytes); // and not what lay in this memory before
  // One number that is read back is an answer that no kernel has given: of one byte ("are all
  // finite?") it is yes, of eight (an index) 0.
  if (from_device && !to_device && bytes == 1)
    *(unsigned char *)to = 1;
  if (from_device && !to_device && bytes == 8)
    memset(to, 0, bytes);
}

cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k,
                            cudaStream_t st) {
  pthread_mutex_lock(&lock);
  copy(d, s, n);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
  pthread_mutex_lock(&lock);
  counted.sync_copies++;
  copy(d, s, n);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t st) {
  counted.d2d++;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void *a, const void *b, size_t n, size_t o,
                               enum cudaMemcpyKind k) {
  return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
  counted.memsets++;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
  counted.memsets++;
  if (n <= REAL_BYTES)
    memset(p, v, n);
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
  static char b[1 << 20];
  *p = b;
  return cudaSuccess;
}
// ---- devices
cudaError_t cudaGetDeviceCount(int *n) {
  init();
  *n = devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d) {
  *d = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  current_device = d;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *b, int n, int d) {
  snprintf(b, n, "0000:0%d:00.0", d + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) {
  *a = 0;
  *b = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) {
  *c = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int p, unsigned f) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  init();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", asked("PRETENDED_NAME", "NVIDIA GeForce RTX 3060"));
  p->totalGlobalMem = memory_bytes;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = capability_major;
  p->minor = capability_minor;
  p->textureAlignment = 512;
  p->multiProcessorCount = multiprocessors;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 192;
  p->l2CacheSize = 3 << 20;
  p->maxThreadsPerMultiProcessor = 1536;
  p->sharedMemPerMultiprocessor = 102400;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->concurrentManagedAccess = 1;
  p->sharedMemPerBlockOptin = 101376;
  p->maxBlocksPerMultiProcessor = 16;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 2;
  for (int i = 0; i < 16; i++)
    p->uuid.bytes[i] = i + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  init();
  switch (a) {
  case cudaDevAttrComputeCapabilityMajor:
    *v = capability_major;
    break;
  case cudaDevAttrComputeCapabilityMinor:
    *v = capability_minor;
    break;
  case cudaDevAttrMultiProcessorCount:
    *v = multiprocessors;
    break;
  case cudaDevAttrMaxSharedMemoryPerBlock:
    *v = 49152;
    break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    *v = 101376;
    break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    *v = 102400;
    break;
  case cudaDevAttrMaxThreadsPerBlock:
    *v = 1024;
    break;
  case cudaDevAttrWarpSize:
    *v = 32;
    break;
  case cudaDevAttrMaxThreadsPerMultiProcessor:
    *v = 1536;
    break;
  case cudaDevAttrMaxGridDimX:
    *v = 2147483647;
    break;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ:
    *v = 65535;
    break;
  case cudaDevAttrMaxBlockDimX:
    *v = 1024;
    break;
  case cudaDevAttrMaxRegistersPerBlock:
  case cudaDevAttrMaxRegistersPerMultiprocessor:
    *v = 65536;
    break;
  case cudaDevAttrConcurrentManagedAccess:
    *v = 1;
    break;
  case cudaDevAttrMemoryPoolsSupported:
    *v = 1;
    break;
  default:
    *v = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
  counted.dev_sync++;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
  *p = (cudaMemPool_t)1;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
  *(uint64_t *)v = 0;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t n) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { return cudaSuccess; }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  pthread_mutex_lock(&lock);
  a->type = holds(&on_device, p) ? cudaMemoryTypeDevice
            : holds(&pinned, p)  ? cudaMemoryTypeHost
                                 : cudaMemoryTypeUnregistered;
  pthread_mutex_unlock(&lock);
  a->devicePointer = (void *)p;
  a->hostPointer = (void *)p;
  return cudaSuccess;
}
// ---- errors
cudaError_t cudaGetLastError(void) {
  cudaError_t e = last;
  last = 0;
  return e;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t e) {
  return e == 2 ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char *cudaGetErrorString(cudaError_t e) {
  return e == 2 ? "out of memory" : e ? "pretended error" : "no error";
}
// ---- streams, events
static uintptr_t next_handle = 4096;
cudaError_t cudaStreamCreate(cudaStream_t *s) {
  next_handle += 16;
  *s = (cudaStream_t)next_handle;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
  next_handle += 16;
  *s = (cudaStream_t)next_handle;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  next_handle += 16;
  *s = (cudaStream_t)next_handle;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  counted.stream_sync++;
  if (traced)
    fprintf(stderr, "[wait] stream\n");
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  counted.stream_wait++;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
  *p = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
  *c = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c,
                                     unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **d, const cudaGraphEdgeData **ed,
                                     size_t *n) {
  if (c)
    *c = cudaStreamCaptureStatusNone;
  if (id)
    *id = 0;
  if (n)
    *n = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned fl) {
  f(s, 0, u);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) {
  f(u);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) {
  next_handle += 16;
  *e = (cudaEvent_t)next_handle;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
  next_handle += 16;
  *e = (cudaEvent_t)next_handle;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  counted.event_rec++;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
  counted.event_rec++;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  counted.event_query++;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  counted.event_sync++;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *t, cudaEvent_t a, cudaEvent_t b) {
  *t = 1;
  return cudaSuccess;
}
// ---- kernels
static int dummy;
void **__cudaRegisterFatBinary(void *f) {
  static void *h;
  return &h;
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void **h, const char *a, char *b, const char *c, int d, void *e,
                            void *f, void *g, void *i, int *j) {}
void __cudaRegisterVar(void **h, char *a, char *b, const char *c, int d, size_t e, int f, int g) {}
static __thread struct {
  dim3 g, b;
  size_t s;
  void *st;
} cfg;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void *st) {
  cfg.g = g;
  cfg.b = b;
  cfg.s = s;
  cfg.st = st;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) {
  *g = cfg.g;
  *b = cfg.b;
  *s = cfg.s;
  *(void **)st = cfg.st;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)&dummy;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s,
                               cudaStream_t st) {
  counted.launches++;
  if (st)
    counted.kernels_side++;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) {
  counted.launches++;
  if (st)
    counted.kernels_side++;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  counted.launches++;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = capability_major * 10 + capability_minor;
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
  return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v,
                                            int d) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b,
                                                                   size_t s, unsigned fl) {
  *n = 2;
  return cudaSuccess;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *c, enum cudaJitOption *o, void **v,
                                unsigned n, enum cudaLibraryOption *lo, void **lv, unsigned ln) {
  *l = (cudaLibrary_t)&dummy;
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *n) {
  *k = (cudaKernel_t)&dummy;
  return cudaSuccess;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t l) { return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
// ---- driver: virtual memory for expandable segments
typedef int CUresult;
typedef unsigned long long P;
CUresult cuInit(unsigned f) { return 0; }
CUresult cuDeviceGetCount(int *n) {
  init();
  *n = devices;
  return 0;
}
CUresult cuDeviceGet(int *d, int i) {
  *d = i;
  return 0;
}
CUresult cuDriverGetVersion(int *v) {
  *v = 13000;
  return 0;
}
CUresult cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) {
  *f = 0;
  *a = 1;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(void **c, int d) {
  *c = &dummy;
  return 0;
}
CUresult cuCtxGetCurrent(void **c) {
  *c = &dummy;
  return 0;
}
CUresult cuCtxSetCurrent(void *c) { return 0; }
CUresult cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
CUresult cuGetErrorString(CUresult e, const char **s) {
  *s = "pretended";
  return 0;
}
CUresult cuGetErrorName(CUresult e, const char **s) {
  *s = "pretended";
  return 0;
}
CUresult cuMemGetAllocationGranularity(size_t *g, const void *p, int o) {
  *g = 2 << 20;
  return 0;
}
CUresult cuMemAddressReserve(P *p, size_t n, size_t al, P a, unsigned long long f) {
  void *m = address_space(n);
  pthread_mutex_lock(&lock);
  add(&on_device, m, n);
  pthread_mutex_unlock(&lock);
  *p = (P)m;
  return 0;
}
CUresult cuMemAddressFree(P p, size_t n) {
  pthread_mutex_lock(&lock);
  forget(&on_device, (void *)p);
  pthread_mutex_unlock(&lock);
  munmap((void *)p, n);
  return 0;
}
static size_t handle_bytes[1 << 20];
static int next_memory_handle = 1;
CUresult cuMemCreate(unsigned long long *h, size_t n, const void *p, unsigned long long f) {
  pthread_mutex_lock(&lock);
  counted.mallocs++;
  if (!take(n)) {
    pthread_mutex_unlock(&lock);
    return 2;
  }
  handle_bytes[next_memory_handle] = n;
  *h = next_memory_handle++;
  if (next_memory_handle >= (1 << 20))
    next_memory_handle = 1;
  pthread_mutex_unlock(&lock);
  return 0;
}
CUresult cuMemRelease(unsigned long long h) {
  pthread_mutex_lock(&lock);
  counted.frees++;
  counted.used -= handle_bytes[h];
  handle_bytes[h] = 0;
  pthread_mutex_unlock(&lock);
  return 0;
}
CUresult cuMemMap(P p, size_t n, size_t o, unsigned long long h, unsigned long long f) { return 0; }
CUresult cuMemUnmap(P p, size_t n) { return 0; }
CUresult cuMemSetAccess(P p, size_t n, const void *d, size_t c) { return 0; }
CUresult cuStreamWriteValue32(void *s, P p, uint32_t v, unsigned f) { return 0; }
static CUresult nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v,
                                             unsigned long long fl,
                                             enum cudaDriverEntryPointQueryResult *r) {
  *f = dlsym(RTLD_DEFAULT, n);
  if (!*f)
    *f = (void *)nothing;
  if (r)
    *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
// ---- cuBLAS with outputs
int cublasCreate_v2(void **h) {
  *h = &dummy;
  return 0;
}
int cublasGetMathMode(void *h, int *m) {
  *m = 0;
  return 0;
}
int cublasGetPointerMode_v2(void *h, int *m) {
  *m = 0;
  return 0;
}
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **d, int a, int b) {
  *d = &dummy;
  return 0;
}
int cublasLtMatmulPreferenceCreate(void **d) {
  *d = &dummy;
  return 0;
}
int cublasLtMatrixLayoutCreate(void **d, int t, uint64_t r, uint64_t c, int64_t l) {
  *d = &dummy;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *a, void *b, void *c, void *d, void *e, void *p,
                                   int n, char *res, int *ret) {
  *ret = 1;
  memset(res, 0, 96);
  return 0;
}
#define G(n)                                                                                       \
  int n() {                                                                                        \
    counted.gemms++;                                                                               \
    return 0;                                                                                      \
  }
G(cublasGemmEx)
G(cublasGemmStridedBatchedEx)
G(cublasSgemm_v2) G(cublasSgemmEx) G(cublasSgemmStridedBatched) G(cublasLtMatmul) G(cublasDgemm_v2)
    G(cublasSgemv_v2)
    // ---- what triton's helper and launcher ask of the driver
    CUresult cuCtxGetLimit(size_t *v, int l) {
  *v = 0;
  return 0;
}
CUresult cuCtxSetLimit(int l, size_t v) { return 0; }
CUresult cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == 0 ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(void *f, int a, int v) { return 0; }
CUresult cuFuncSetCacheConfig(void *f, int c) { return 0; }
CUresult cuModuleLoadData(void **m, const void *d) {
  *m = &dummy;
  return 0;
}
CUresult cuModuleGetFunction(void **f, void *m, const char *n) {
  *f = &dummy;
  return 0;
}
CUresult cuModuleUnload(void *m) { return 0; }
CUresult cuPointerGetAttribute(void *d, int a, P p) {
  *(P *)d = p;
  return 0;
}
CUresult cuLaunchKernelEx(const void *c, void *f, void **a, void **x) {
  counted.launches++;
  return 0;
}
CUresult cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e,
                        unsigned g, unsigned s, void *st, void **p, void **x) {
  counted.launches++;
  return 0;
}
CUresult cuOccupancyMaxActiveClusters(int *n, void *f, const void *c) {
  *n = 4;
  return 0;
}
CUresult cuTensorMapEncodeTiled() { return 0; }
