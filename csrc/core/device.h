// Interface to GPUs for the layers above, without any CUDA header. It is implemented by device.cu,
// or by device_no_cuda.cpp in a build without CUDA, where there is no GPU and a request for one
// throws.
//
// Work is queued on the caller's stream and nothing here waits, except where a comment says so.
// Work on a stream of the CPU is done when the call returns.
#pragma once
#include <memory>
#include <string>

#include "core/types.h"

namespace pycomm::device {

PYCOMM_API bool built();
/// Returns the number of GPUs that this process sees; 0 without a driver. Never throws.
PYCOMM_API int count() noexcept;

/// Properties of a GPU. `uuid` is the same in all processes of the host, whatever GPUs they see.
struct Properties {
  std::string name;
  std::string uuid;  ///< 16 bytes
  int multiprocessors = 0;
};
PYCOMM_API Properties properties(int index);

/// Guard that makes a GPU the current one of this thread; -1 changes nothing.
class PYCOMM_API Guard {
 public:
  explicit Guard(int index);
  ~Guard();
  Guard(const Guard&) = delete;

 private:
  int before_;
};

// Memory. It is freed with the last copy of its pointer.

/// Allocates zeroed memory of a GPU. Waits.
PYCOMM_API std::shared_ptr<void> allocate(int index, size_t bytes);
/// Returns the address by which kernels reach existing host memory, such as a mapped file. The
/// memory must be page-aligned and stay until the pointer is gone.
PYCOMM_API std::shared_ptr<void> map_host(void* memory, size_t bytes);

/// True if kernels on `index` can read and write memory of GPU `peer`; always true for itself.
PYCOMM_API bool reaches(int index, int peer);
/// Enables that access for memory of this process.
PYCOMM_API void connect(int index, int peer);
/// Returns a handle by which another process of the host finds memory that came from allocate().
PYCOMM_API std::string export_memory(const void* memory);
/// Maps memory by its handle `word`, for kernels on GPU `index`. Throws Error if they cannot reach
/// it.
PYCOMM_API std::shared_ptr<void> import_memory(int index, const std::string& word);

// Work on a stream, whose GPU is current.

/// Copies between any two of host and GPUs. It waits for host memory that is not pinned.
PYCOMM_API void copy(void* to, const void* from, size_t bytes, Stream stream);
/// Waits for all queued work.
PYCOMM_API void synchronize(Stream stream);
/// True if a CUDA graph captures the queued work. Then nothing may wait, allocate or query events.
PYCOMM_API bool is_capturing(Stream stream);

/// Makes a stream that waits for no other.
PYCOMM_API std::shared_ptr<void> make_stream(int index);

}  // namespace pycomm::device
