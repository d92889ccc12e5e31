// The CUDA driver: memory that is mapped page by page, for expandable segments, and modules that hold nothing.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <string>

#include "device.h"

using namespace simulated;

namespace {

struct Pages {
  size_t bytes;
  int device;
};

CUresult refuse() { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult error_text(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the simulated device";
  return CUDA_SUCCESS;
}

CUresult reserve_addresses(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* found = mmap(nullptr, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (CUdeviceptr(found) + PAGE - 1) / PAGE * PAGE;
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr address, size_t bytes) {
  munmap((void*)address, bytes);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted,
                unsigned long long) {
  count(MALLOC);
  int device = wanted->location.id;
  if (!charge(bytes, device)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle) new Pages{bytes, device};
  return CUDA_SUCCESS;
}

CUresult drop(CUmemGenericAllocationHandle handle) {
  count(FREE);
  auto* pages = (Pages*)handle;
  discharge(pages->bytes, pages->device);
  delete pages;
  return CUDA_SUCCESS;
}

CUresult map_pages(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                   unsigned long long) {
  map((void*)address, bytes, ((Pages*)handle)->device);
  return CUDA_SUCCESS;
}

CUresult unmap_pages(CUdeviceptr address, size_t bytes) {
  unmap((void*)address, bytes);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

CUresult no_attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult get_device(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

CUresult current_context(CUcontext* context) {
  *context = (CUcontext)0x10;
  return CUDA_SUCCESS;
}

CUresult retain_context(CUcontext* context, CUdevice) { return current_context(context); }

CUresult context_state(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

}  // namespace

// PyTorch asks the runtime for these by name.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuGetErrorString", (void*)error_text},
      {"cuMemAddressReserve", (void*)reserve_addresses},
      {"cuMemAddressFree", (void*)free_addresses},
      {"cuMemCreate", (void*)create},
      {"cuMemRelease", (void*)drop},
      {"cuMemMap", (void*)map_pages},
      {"cuMemUnmap", (void*)unmap_pages},
      {"cuMemSetAccess", (void*)set_access},
      {"cuMemGetAllocationGranularity", (void*)granularity},
      {"cuDeviceGetAttribute", (void*)no_attribute},
      {"cuDeviceGet", (void*)get_device},
      {"cuCtxGetCurrent", (void*)current_context},
      {"cuDevicePrimaryCtxRetain", (void*)retain_context},
      {"cuDevicePrimaryCtxGetState", (void*)context_state}};
  auto found = known.find(name);
  *function = found == known.end() ? (void*)refuse : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// These are linked to by PyTorch's run-time compiler. The header has macros for some names.
#define DOES_NOTHING(name) EXPORT int name##_is_simulated() __asm__(#name); int name##_is_simulated() { return 0; }
#define REFUSES(name) EXPORT int name##_is_simulated() __asm__(#name); int name##_is_simulated() { return 801; }
#define GIVES(name, type, value) \
  EXPORT int name##_is_simulated(type* out) __asm__(#name); \
  int name##_is_simulated(type* out) { *out = value; return 0; }

DOES_NOTHING(cuInit)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLaunchCooperativeKernel)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuLinkDestroy)
DOES_NOTHING(cuLinkAddData_v2)
REFUSES(cuTensorMapEncodeTiled)
REFUSES(cuPointerGetAttribute)
REFUSES(cuModuleGetGlobal_v2)
GIVES(cuModuleLoadData, void*, (void*)0x50)
GIVES(cuModuleLoadDataEx, void*, (void*)0x50)
GIVES(cuModuleLoad, void*, (void*)0x50)
GIVES(cuModuleGetFunction, void*, (void*)0x60)
GIVES(cuFuncGetAttribute, int, 32)
GIVES(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 4)
GIVES(cuCtxGetCurrent, void*, (void*)0x10)
GIVES(cuDevicePrimaryCtxRetain, void*, (void*)0x10)
GIVES(cuDriverGetVersion, int, CUDART_VERSION)
GIVES(cuDeviceGetAttribute, int, 1)

EXPORT int device_get(int* device, int number) __asm__("cuDeviceGet");
int device_get(int* device, int number) {
  *device = number;
  return 0;
}
EXPORT int context_get(int, unsigned* flags, int* active) __asm__("cuDevicePrimaryCtxGetState");
int context_get(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
EXPORT int text_of(int, const char** text) __asm__("cuGetErrorString");
int text_of(int error, const char** text) { return error_text(CUresult(error), text); }
EXPORT int link_create(unsigned, void*, void*, void** link) __asm__("cuLinkCreate_v2");
int link_create(unsigned, void*, void*, void** link) {
  *link = (void*)0x70;
  return 0;
}
EXPORT int link_complete(void*, void** code, size_t* bytes) __asm__("cuLinkComplete");
int link_complete(void*, void** code, size_t* bytes) {
  static char nothing[8];
  *code = nothing;
  *bytes = sizeof nothing;
  return 0;
}
