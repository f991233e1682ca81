// Launches of CUDA kernels: a codec's .cpp says by launch() which kernel runs with which arguments
// over how many values, whoever compiles the kernel. In a build with nvcc it is found by its name
// in the table of the codec's .cu (kernels_cuda.h) and started; with NVRTC, Python records the
// launches (Recording), compiles the kernels by the same names and starts them; tests do the same
// with g++. Launches of the same kernel for several tensors become one (Batching).
#pragma once
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "codecs/base/codec.h"
#include "codecs/base/params.h"

namespace pycomm::codecs {

/// One launch: `blocks` blocks of cuda::kThreads threads. Its only argument is a Batch.
struct PYCOMM_API Launch {
  std::string codec;   ///< name of the .cu file that lists the kernel
  std::string kernel;  ///< C++ name as seen from pycomm::codecs, with its template arguments
  unsigned blocks = 0;
  size_t bytes = 0;                ///< of the arguments for one tensor
  std::vector<uint8_t> tensors;    ///< the arguments for each
  const float* swapped = nullptr;  ///< see BatchHead

  size_t count() const { return tensors.size() / bytes; }
  /// Adds the tensors of a launch of the same kernel. Returns false if there is no room.
  bool add(const Launch& other);
  /// Returns the bytes of the Batch.
  std::vector<uint8_t> argument() const;
};

/// While it lives, the launches of its thread are held back, until start() starts them with as few
/// launches as possible: those of one row one after the other, in any order with those of other
/// rows.
class PYCOMM_API Batching {
 public:
  /// `swapped`: see BatchHead.
  explicit Batching(const float* swapped = nullptr);
  ~Batching();
  Batching(const Batching&) = delete;

  /// Begins a row.
  void row() { rows_.emplace_back(); }
  void start(const Stream& stream);
  /// Adds a launch to the row.
  void hold(Launch launch) {
    launch.swapped = swapped_;
    rows_.back().push_back(std::move(launch));
  }

 private:
  const float* const swapped_;
  std::vector<std::vector<Launch>> rows_;
  Batching* const outer_;
};

/// While it lives, the launches of its thread are listed, in order, and not started.
class PYCOMM_API Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  std::vector<Launch> launches;
};

// Template arguments of a kernel as they stand in its name.
inline std::string argument(bool value) { return value ? "true" : "false"; }
inline std::string argument(int value) { return std::to_string(value); }
inline std::string argument(std::string type) { return type; }

/// Returns the name of a kernel: ("sign::encode_kernel", 64, true) is sign::encode_kernel<64,
/// true>.
template <typename... Rest, typename First>
std::string kernel_name(const std::string& name, const First& first, const Rest&... rest) {
  std::string text = name + "<" + argument(first);
  ((text += ", " + argument(rest)), ...);
  return text + ">";
}

// Kernels in this build: codecs/cuda.cu has what the .cu files list (kernels_cuda.h); no_cuda.cpp
// is for a build without CUDA, where start() and load_kernels() throw Error. CMake picks one; no
// other source depends on what was built.

PYCOMM_API bool cuda_built();

/// Starts a kernel that a .cu file lists. Throws Error with the driver's words, or if no file does.
void start(const Launch& launch, const Stream& stream);

/// Loads all kernels onto the current GPU: loading one later may wait for others that run.
void load_kernels();

/// Holds back, records or starts a launch; launch() calls it.
void run(Launch launch, const Stream& stream);

/// Runs a kernel over `numel` values, of which a warp takes `tile`, on the stream of the caller,
/// whose device is current. Throws Error if the kernel cannot be started.
template <typename Params>
void launch(const char* codec, std::string kernel, const Params& params, size_t numel, size_t tile,
            const Stream& stream) {
  if (numel == 0) return;
  static_assert(offsetof(Params, blocks) == 0 && batch_room(sizeof(Params)) > 0);
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) % sizeof(uint64_t) == 0);
  const size_t per_block = size_t{cuda::kWarps} * tile;
  const auto blocks = static_cast<unsigned>((numel + per_block - 1) / per_block);
  Params own = params;
  own.blocks = {0, blocks};
  const auto* bytes = reinterpret_cast<const uint8_t*>(&own);
  run({codec, std::move(kernel), blocks, sizeof own, {bytes, bytes + sizeof own}, nullptr}, stream);
}

/// Returns the arguments of an encode of a codec with several kernels, with its own fields 0.
template <typename Params>
Params staged_params(const EncodeArgs& args) {
  Params params{};
  params.in = args.in.data;
  params.residual = args.residual.floats();
  params.new_residual = args.residual.fresh_floats();
  params.payload = args.out.data;
  params.scratch = args.stream.scratch.data;
  params.numel = args.in.size;
  return params;
}

/// As above, of a decode; kernels of decoding do not write the payload.
template <typename Params>
Params staged_params(Span<const uint8_t> payload, Span<float> out, const Stream& stream) {
  Params params{};
  params.out = out.data;
  params.payload = const_cast<uint8_t*>(payload.data);
  params.scratch = stream.scratch.data;
  params.numel = out.size;
  return params;
}

}  // namespace pycomm::codecs
