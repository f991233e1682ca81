// The seam to GPUs: what the layers above ask of one, in words that need no CUDA header. device.cu,
// or device_no_cuda.cpp in a build without CUDA, where there is no GPU and asking for one throws.
//
// Work goes onto the caller's stream and nothing here waits, but for what says so. Of a stream of
// the CPU everything is done when the call returns.
#pragma once
#include <memory>
#include <string>

#include "core/types.h"

namespace pycomm::device {

PYCOMM_API bool built();
/// GPUs that this process sees; 0 without a driver. Never throws.
PYCOMM_API int count() noexcept;
/// The GPU of this thread.
PYCOMM_API int current();
/// Where memory is: number of its GPU, or -1 if it is the host's.
PYCOMM_API int of(const void* memory);

/// What is known of a GPU. `uuid` is the same in all processes of the host, whatever they see.
struct Properties {
  std::string name;
  std::string uuid;  ///< 16 bytes
  int multiprocessors = 0;
};
PYCOMM_API Properties properties(int index);

/// Makes a GPU that of this thread; -1 changes nothing.
class PYCOMM_API Guard {
 public:
  explicit Guard(int index);
  ~Guard();
  Guard(const Guard&) = delete;

 private:
  int before_;
};

// Memory. It is let go of with the last copy of its pointer.

/// Zeros in the memory of a GPU. Waits.
PYCOMM_API std::shared_ptr<void> allocate(int index, size_t bytes);
/// Host memory that is never paged out, so that copies to and from any GPU need not wait. Kernels
/// may use it too.
PYCOMM_API std::shared_ptr<void> allocate_pinned(size_t bytes);
/// The address by which kernels reach host memory that we have, such as a mapped file:
/// page-aligned, and it must stay until the pointer is gone.
PYCOMM_API std::shared_ptr<void> map_host(void* memory, size_t bytes);

/// True if kernels on `index` can read and write memory of GPU `peer`. Of itself always.
PYCOMM_API bool reaches(int index, int peer);
/// Makes it so, for memory of this process.
PYCOMM_API void connect(int index, int peer);
/// A word by which another process of the host finds memory that came from allocate().
PYCOMM_API std::string export_memory(const void* memory);
/// That memory, for kernels on GPU `index`. Throws Error if they cannot reach it.
PYCOMM_API std::shared_ptr<void> import_memory(int index, const std::string& word);

// Work on a stream, whose GPU is current.

/// Between any two of host and GPUs. Host memory that is not pinned makes it wait.
PYCOMM_API void copy(void* to, const void* from, size_t bytes, Stream stream);
PYCOMM_API void fill_zero(void* memory, size_t bytes, Stream stream);
/// Waits for all that is queued.
PYCOMM_API void synchronize(Stream stream);
/// True if a CUDA graph captures what is queued. Then nothing may wait, allocate or look at events.
PYCOMM_API bool is_capturing(Stream stream);

/// A stream of its own, which waits for no other.
PYCOMM_API std::shared_ptr<void> make_stream(int index);

/// A mark on a stream, without a time.
class PYCOMM_API Event {
 public:
  explicit Event(int index);
  /// Again moves the mark.
  void record(Stream stream);
  /// What is queued on `stream` from here on starts behind the mark.
  void block(Stream stream) const;
  /// True if all before the mark is done, or nothing was recorded.
  bool done() const;
  /// Waits for it.
  void wait() const;

 private:
  std::shared_ptr<void> event_;
};

}  // namespace pycomm::device
