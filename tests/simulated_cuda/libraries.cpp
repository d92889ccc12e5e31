// cuBLAS, NVML and NVRTC: products that compute nothing, no other processes, compilers that compile nothing.
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace simulated;

#define DOES_NOTHING(name) \
  EXPORT int name() { return 0; }
#define REFUSES(name) \
  EXPORT int name() { return 3; }
#define MULTIPLIES(name) \
  EXPORT int name() { \
    count(PRODUCT); \
    return 0; \
  }
#define CREATES(name) \
  EXPORT int name(void** out) { \
    *out = calloc(1, 256); \
    return 0; \
  }
#define DESTROYS(name) \
  EXPORT int name(void* made) { \
    free(made); \
    return 0; \
  }
#define GIVES(name, type, value) \
  EXPORT int name(type* out) { \
    *out = value; \
    return 0; \
  }
#define TELLS(name, type, value) \
  EXPORT int name(void*, type* out) { \
    *out = value; \
    return 0; \
  }

// ---- cuBLAS ----
GIVES(cublasCreate_v2, void*, (void*)0x30)
DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasSetSmCountTarget)
TELLS(cublasGetMathMode, int, 0)
TELLS(cublasGetPointerMode_v2, int, 0)
MULTIPLIES(cublasGemmEx)
MULTIPLIES(cublasSgemmEx)
MULTIPLIES(cublasGemmStridedBatchedEx)
MULTIPLIES(cublasSgemm_v2)
MULTIPLIES(cublasDgemm_v2)
MULTIPLIES(cublasSgemmStridedBatched)
MULTIPLIES(cublasDgemmStridedBatched)
MULTIPLIES(cublasSgemv_v2)
MULTIPLIES(cublasDgemv_v2)
MULTIPLIES(cublasDotEx)
MULTIPLIES(cublasSdot_v2)
MULTIPLIES(cublasDdot_v2)

MULTIPLIES(cublasLtMatmul)
CREATES(cublasLtMatmulDescCreate)
DESTROYS(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
CREATES(cublasLtMatrixLayoutCreate)
DESTROYS(cublasLtMatrixLayoutDestroy)
CREATES(cublasLtMatmulPreferenceCreate)
DESTROYS(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
EXPORT size_t cublasLtGetVersion() { return 130400; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, void* results,
                                          int* found) {
  memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t: an algorithm that needs no workspace
  *found = wanted > 0;
  return 0;
}

// ---- NVML ----
DOES_NOTHING(nvmlInit_v2)
DOES_NOTHING(nvmlShutdown)
TELLS(nvmlDeviceGetHandleByPciBusId_v2, void*, (void*)0x40)
TELLS(nvmlDeviceGetComputeRunningProcesses, unsigned, 0)
REFUSES(nvmlDeviceGetComputeRunningProcesses_v3)
REFUSES(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSES(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSES(nvmlSystemGetCudaDriverVersion_v2)
DOES_NOTHING(nvmlDeviceGetGpuFabricInfoV)
REFUSES(nvmlDeviceGetCount_v2)
REFUSES(nvmlDeviceGetHandleByIndex_v2)
REFUSES(nvmlDeviceGetUUID)

// ---- NVRTC ----
CREATES(nvrtcCreateProgram)
DOES_NOTHING(nvrtcCompileProgram)
DOES_NOTHING(nvrtcAddNameExpression)
DOES_NOTHING(nvrtcGetNumSupportedArchs)
DOES_NOTHING(nvrtcGetSupportedArchs)
TELLS(nvrtcGetPTXSize, size_t, 8)
TELLS(nvrtcGetCUBINSize, size_t, 8)
TELLS(nvrtcGetProgramLogSize, size_t, 1)
TELLS(nvrtcGetProgramLog, char, 0)
EXPORT int nvrtcDestroyProgram(void** program) {
  free(*program);
  *program = nullptr;
  return 0;
}
EXPORT int nvrtcGetPTX(void*, char* code) {
  memset(code, 0, 8);
  return 0;
}
EXPORT int nvrtcGetCUBIN(void*, char* code) { return nvrtcGetPTX(nullptr, code); }
EXPORT int nvrtcGetLoweredName(void*, const char* name, const char** lowered) {
  *lowered = name;
  return 0;
}
EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
EXPORT const char* nvrtcGetErrorString(int) { return "an error of the simulated device"; }
