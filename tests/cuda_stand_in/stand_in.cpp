// A stand-in for the CUDA runtime, the driver and cuBLAS, for machines without a GPU.
//
// Preloaded into a CUDA build of torch, it lets all of torch's host code for CUDA run: memory is host memory, kernels and
// products do nothing, copies are done at once. A capture refuses what CUDA's documentation says that a capture refuses:
// waiting for a stream, an event or the device, copying from or to pageable memory, allocating outside of relaxed mode, and
// work on another stream. So it tells whether a call can be captured and whether it makes the host wait, not what it computes.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define DONE(declaration) API cudaError_t declaration { return cudaSuccess; }

namespace {
std::mutex mutex_;
std::map<char*, size_t> device_memory, pinned_memory;
cudaStream_t capturing = nullptr;
bool active = false, invalidated = false;
cudaStreamCaptureMode begun_as;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
long nodes = 0, waits = 0, refusals = 0, graph_launches = 0;
size_t next_handle = 4096;

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t refuse(const char* what, cudaError_t error = cudaErrorStreamCaptureUnsupported) {
  refusals++;
  invalidated = true;
  std::fprintf(stderr, "stand-in: %s is refused while a stream is captured\n", what);
  return fail(error);
}

bool holds(const std::map<char*, size_t>& memory, const void* pointer) {
  auto after = memory.upper_bound((char*)pointer);
  if (after == memory.begin()) return false;
  --after;
  return (char*)pointer < after->first + after->second;
}

bool is_legacy(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }
bool allocates_in_capture() {
  return active && mode_of_thread != cudaStreamCaptureModeRelaxed && begun_as != cudaStreamCaptureModeRelaxed;
}

template <class Handle> cudaError_t make(Handle* handle) {
  *handle = (Handle)(next_handle += 16);
  return cudaSuccess;
}

cudaError_t enqueue(const char* what, cudaStream_t stream) {
  if (!active) return cudaSuccess;
  if (stream != capturing) return refuse(what, cudaErrorStreamCaptureImplicit);
  nodes++;
  return cudaSuccess;
}

cudaError_t allocate(const char* what, std::map<char*, size_t>& memory, void** pointer, size_t size) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (allocates_in_capture()) return refuse(what);
  *pointer = std::calloc(1, size + 512);
  memory[(char*)*pointer] = size;
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t release(const char* what, std::map<char*, size_t>& memory, void* pointer) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (pointer == nullptr) return cudaSuccess;
  if (allocates_in_capture()) return refuse(what);
  memory.erase((char*)pointer);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t wait(const char* what, bool concerned = true) {
  waits++;
  return active && concerned ? refuse(what) : cudaSuccess;
}
}  // namespace

// What happened so far: nodes of the last capture, waits of the host, refusals, graphs launched.
API void stand_in_counts(long* out) { out[0] = nodes, out[1] = waits, out[2] = refusals, out[3] = graph_launches; }

// The device: one like an A100
API cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
DONE(cudaSetDevice(int))
API cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* it, int) {
  std::memset(it, 0, sizeof *it);
  std::strcpy(it->name, "Stand-in");
  it->major = 8, it->minor = 0, it->multiProcessorCount = 108, it->warpSize = 32, it->totalGlobalMem = (size_t)16 << 30;
  it->sharedMemPerBlock = 49152, it->sharedMemPerBlockOptin = 166912, it->sharedMemPerMultiprocessor = 167936;
  it->regsPerBlock = it->regsPerMultiprocessor = 65536, it->l2CacheSize = 40 << 20, it->totalConstMem = 65536;
  it->maxThreadsPerBlock = 1024, it->maxThreadsPerMultiProcessor = 2048, it->maxBlocksPerMultiProcessor = 32;
  it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024, it->maxThreadsDim[2] = 64;
  it->maxGridSize[0] = 2147483647, it->maxGridSize[1] = it->maxGridSize[2] = 65535;
  it->unifiedAddressing = it->concurrentKernels = 1, it->textureAlignment = 512;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMultiProcessorCount, 108}, {cudaDevAttrComputeCapabilityMajor, 8}, {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 166912}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 167936}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { *least = 0, *most = -5; return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = (size_t)15 << 30, *total = (size_t)16 << 30;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t) { return "stand-in"; }
API const char* cudaGetErrorString(cudaError_t error) {
  bool of_capture = error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
  return of_capture ? "operation not permitted when stream is capturing" : "error of the stand-in";
}

// Memory and copies
API cudaError_t cudaMalloc(void** pointer, size_t size) { return allocate("cudaMalloc", device_memory, pointer, size); }
API cudaError_t cudaFree(void* pointer) { return release("cudaFree", device_memory, pointer); }
API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  return allocate("cudaHostAlloc", pinned_memory, pointer, size);
}
API cudaError_t cudaFreeHost(void* pointer) { return release("cudaFreeHost", pinned_memory, pointer); }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* it, const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex_);
  std::memset(it, 0, sizeof *it);
  it->type = cudaMemoryTypeUnregistered;
  if (holds(device_memory, pointer)) it->type = cudaMemoryTypeDevice;
  if (holds(pinned_memory, pointer)) it->type = cudaMemoryTypeHost;
  it->devicePointer = it->hostPointer = it->type == cudaMemoryTypeUnregistered ? nullptr : (void*)pointer;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (const void* end : {(const void*)to, from})
    if (active && !holds(device_memory, end) && !holds(pinned_memory, end)) return refuse("a copy of pageable host memory");
  if (active) return enqueue("a copy on another stream", stream);
  std::memcpy(to, from, size);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  cudaError_t waited = wait("cudaMemcpy");
  if (waited == cudaSuccess) std::memcpy(to, from, size);
  return waited;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  if (active) return enqueue("a fill on another stream", stream);
  std::memset(to, value, size);
  return cudaSuccess;
}

// Streams, events, waiting
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return active ? refuse("cudaStreamQuery") : cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait("cudaStreamSynchronize"); }
API cudaError_t cudaDeviceSynchronize() { return wait("cudaDeviceSynchronize"); }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
API cudaError_t cudaEventQuery(cudaEvent_t) {
  return active && mode_of_thread == cudaStreamCaptureModeGlobal ? refuse("cudaEventQuery") : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("cudaEventSynchronize"); }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return cudaSuccess; }
DONE(cudaEventDestroy(cudaEvent_t))
DONE(cudaEventRecord(cudaEvent_t, cudaStream_t))
DONE(cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned))
DONE(cudaStreamDestroy(cudaStream_t))
DONE(cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned))

// Captures
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (is_legacy(stream)) return refuse("capturing the legacy stream");
  capturing = stream, begun_as = mode, active = true, invalidated = false, nodes = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  active = false, capturing = nullptr, *graph = nullptr;
  return invalidated ? fail(cudaErrorStreamCaptureInvalidated) : make(graph);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = active && stream == capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** before, const cudaGraphEdgeData** edges,
                                         size_t* count) {
  if (id) *id = 1;
  if (graph) *graph = (cudaGraph_t)16;
  if (before) *before = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t, unsigned long long) { return make(made); }
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { *count = nodes; return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { graph_launches++; return cudaSuccess; }
DONE(cudaGraphDestroy(cudaGraph_t))
DONE(cudaGraphExecDestroy(cudaGraphExec_t))

// Kernels: what a compiler makes of <<<>>>, and what libraries ask before a launch
struct Configuration { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Configuration> configurations;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration it = configurations.back();
  configurations.pop_back();
  *grid = it.grid, *block = it.block, *shared = it.shared, *(cudaStream_t*)stream = it.stream;
  return cudaSuccess;
}
static cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream) {
  size_t threads = (size_t)block.x * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
    return fail(cudaErrorInvalidConfiguration);
  return enqueue("a launch on another stream", stream);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(grid, block, stream);
}
API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(grid, block, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* it, const void*, void**) {
  return launch(it->gridDim, it->blockDim, it->stream);
}
API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* it, const void*) {
  std::memset(it, 0, sizeof *it);
  it->maxThreadsPerBlock = 1024, it->numRegs = 32, it->maxDynamicSharedSizeBytes = 166912;
  it->ptxVersion = it->binaryVersion = 80;
  return cudaSuccess;
}
DONE(cudaFuncSetAttribute(const void*, cudaFuncAttribute, int))
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// The driver: a context that is there
static int unsupported() { return 801; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = (void*)unsupported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API int cuInit(unsigned) { return 0; }
API int cuGetErrorString(int, const char** text) { *text = "error of the stand-in"; return 0; }
API int cuCtxGetCurrent(void** context) { *context = (void*)16; return 0; }
API int cuCtxSetCurrent(void*) { return 0; }
API int cuDeviceGet(int* device, int) { *device = 0; return 0; }
API int cuDeviceGetAttribute(int* value, int, int) { *value = 0; return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) { *flags = 0, *is_active = 1; return 0; }
API int cuDevicePrimaryCtxRetain(void** context, int) { *context = (void*)16; return 0; }

// cuBLAS: products that do nothing, each a node of the graph
#define PRODUCT(name) API int name(...) { if (active) nodes++; return 0; }
#define NOTHING(name) API int name(...) { return 0; }
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx) PRODUCT(cublasSgemmEx) PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasSgemv_v2) PRODUCT(cublasLtMatmul)
NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasDestroy_v2) NOTHING(cublasLtDestroy) NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute) NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasLtMatmulPreferenceDestroy)
API int cublasCreate_v2(void** handle) { *handle = (void*)16; return 0; }
API int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
API int cublasLtCreate(void** handle) { *handle = (void*)16; return 0; }
API int cublasLtMatmulDescCreate(void** made, int, int) { *made = (void*)16; return 0; }
API int cublasLtMatrixLayoutCreate(void** made, int, unsigned long, unsigned long, long) { *made = (void*)16; return 0; }
API int cublasLtMatmulPreferenceCreate(void** made) { *made = (void*)16; return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* algorithm, int* found) {
  std::memset(algorithm, 0, 8);
  *found = 1;
  return 0;
}
