#include "core/stream_hold.h"

#include <dlfcn.h>

namespace pycomm {
namespace {

// Declared as in cuda.h: CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned flags). Pinned memory
// has one address on host and device.
using WaitValue32 = int (*)(void*, unsigned long long, uint32_t, unsigned);
constexpr unsigned kGreaterOrEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ

template <typename Function>
Function find(const char* name) {
  // The driver is never closed: streams may wait for as long as the process lives.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  return driver ? reinterpret_cast<Function>(dlsym(driver, name)) : nullptr;
}

WaitValue32 wait_value() {
  // The first version needs, on some drivers, a kernel module that was loaded with an option.
  static const auto found = find<WaitValue32>("cuStreamWaitValue32_v2");
  return found;
}

bool hold_cuda(void* stream, const uint32_t* word, uint32_t value) {
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(word));
  return wait_value()(stream, address, value, kGreaterOrEqual) == 0;
}

}  // namespace

StreamHold cuda_stream_hold() { return wait_value() ? &hold_cuda : nullptr; }

ExchangeCaptureMode cuda_exchange_capture_mode() {
  static const auto found = find<ExchangeCaptureMode>("cuThreadExchangeStreamCaptureMode");
  return found;
}

}  // namespace pycomm
