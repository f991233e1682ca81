// Interface to GPUs on the CUDA runtime; device_no_cuda.cpp is the one without CUDA.
#include <cuda_runtime.h>

#include <cstring>

#include "core/device.h"
#include "core/error.h"

namespace pycomm::device {
namespace {

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // clears the error for the next launch
  throw Error(std::string("cuda: cannot ") + what + ": " + cudaGetErrorString(code));
}

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

bool built() { return true; }

int count() noexcept {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess) return gpus;
  cudaGetLastError();
  return 0;
}

Properties properties(int index) {
  cudaDeviceProp found{};
  check(cudaGetDeviceProperties(&found, index), "ask for the properties of a device");
  return {found.name, std::string(found.uuid.bytes, sizeof found.uuid.bytes),
          found.multiProcessorCount};
}

Guard::Guard(int index) : before_(-1) {
  if (index < 0) return;
  int before = 0;
  check(cudaGetDevice(&before), "ask for the current device");
  if (before == index) return;
  check(cudaSetDevice(index), "switch to a device");
  before_ = before;
}

Guard::~Guard() {
  if (before_ >= 0) cudaSetDevice(before_);
}

// ------------------------------------------------------------------------------- memory

std::shared_ptr<void> allocate(int index, size_t bytes) {
  const Guard guard(index);
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "allocate memory of a device");
  std::shared_ptr<void> owned(memory, [](void* p) { cudaFree(p); });
  // A stream of its own is used: kernels of others may be waiting for this rank.
  const std::shared_ptr<void> stream = make_stream(index);
  check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream.get())), "clear memory");
  synchronize({Device::cuda, stream.get()});
  return owned;
}

std::shared_ptr<void> map_host(void* memory, size_t bytes) {
  check(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "register host memory");
  void* mapped = nullptr;
  const cudaError_t code = cudaHostGetDevicePointer(&mapped, memory, 0);
  if (code != cudaSuccess) cudaHostUnregister(memory);
  check(code, "map host memory");
  return {mapped, [memory](void*) { cudaHostUnregister(memory); }};
}

bool reaches(int index, int peer) {
  if (index == peer) return true;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, index, peer), "ask whether devices reach each other");
  return can != 0;
}

void connect(int index, int peer) {
  if (index == peer) return;
  const Guard guard(index);
  const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    check(code, "connect two devices");
  }
}

std::string export_memory(const void* memory) {
  cudaIpcMemHandle_t word;
  check(cudaIpcGetMemHandle(&word, const_cast<void*>(memory)), "export memory of a device");
  return std::string(word.reserved, sizeof word.reserved);
}

std::shared_ptr<void> import_memory(int index, const std::string& word) {
  cudaIpcMemHandle_t copy;
  if (word.size() != sizeof copy.reserved) throw Error("cuda: this is no word for memory");
  std::memcpy(copy.reserved, word.data(), word.size());
  const Guard guard(index);
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, copy, cudaIpcMemLazyEnablePeerAccess),
        "open memory of another process");
  return {memory, [](void* p) { cudaIpcCloseMemHandle(p); }};
}

// ------------------------------------------------------------------------------ streams

void copy(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (stream.device == Device::cpu) {
    std::memmove(to, from, bytes);
  } else {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle(stream)), "copy");
  }
}

void synchronize(Stream stream) {
  if (stream.device == Device::cpu) return;
  check(cudaStreamSynchronize(handle(stream)), "wait for a stream");
}

bool is_capturing(Stream stream) {
  if (stream.device == Device::cpu) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle(stream), &status), "ask whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

std::shared_ptr<void> make_stream(int index) {
  const Guard guard(index);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
  return {stream, [](void* p) { cudaStreamDestroy(static_cast<cudaStream_t>(p)); }};
}

}  // namespace pycomm::device
