// Arguments of the collective kernels, and their launch on the device of a stream.
#pragma once
#include <algorithm>
#include <iterator>

#include "core/op.h"
#include "transports/device/peer_pointers.h"

namespace pycomm::device {

/// Arguments of every kernel.
struct DeviceCall {
  PeerPointers peers;
  uint64_t seq;         ///< number of the operation, for error reports
  uint64_t timeout_ns;  ///< for each wait
  uint64_t slot_bytes;  ///< of one block in each half of the memory that a rank shares; 16 k
  uint32_t slots;       ///< in a half: the most blocks of any operation
  uint32_t hash;        ///< of the operation: equal where ranks make the same call
};

/// A run of bytes for, or from, each rank.
struct Runs {
  uint8_t* data[kMaxPeers];
  uint64_t bytes[kMaxPeers];

  size_t longest() const { return *std::max_element(std::begin(bytes), std::end(bytes)); }
};

/// Call that moves data unchanged: every rank shares what it sends, and takes what is for it.
struct MoveCall {
  DeviceCall call;
  /// Data to share: one run for all if `mine` is 0, else a run for each rank.
  Runs in;
  int runs;  ///< 1 or the number of ranks
  Runs out;  ///< what is taken from each rank; 0 bytes: nothing
};

/// Call that overwrites a result if an operation has failed before it on the stream.
struct SpoilCall {
  const Progress* progress;
  uint8_t* result;
  uint64_t bytes;
  float* found_inf;  ///< becomes nonzero then; may be null
};

enum class ReduceAlgo : uint8_t {
  one_shot,  ///< every rank reads all data, and has the result
  two_shot,  ///< the owner of a chunk reads it from all, and every rank reads the results
  scatter,   ///< each rank has a part of its own
};

/// Call that reduces one value from each rank to one.
struct ReduceCall {
  DeviceCall call;
  Runs in;  ///< scatter: a part for each rank; else run 0, of which all ranks have as many bytes
  uint8_t* out;
  ReduceAlgo algo;
  ReduceOp op;
  int root;  ///< the rank that needs the result; -1: all. Not of scatter
  int divisor;
  double factor;  ///< of our own contribution to a premul_sum, else 1
};

void start(const MoveCall& call, int blocks, Stream stream);
void start(const SpoilCall& call, int blocks, Stream stream);
/// Starts a reduction. The type and op are those that lower() returns (core/reduce.h).
void start(const ReduceCall& call, DType dtype, int blocks, Stream stream);
/// Loads all kernels onto the current GPU, with those of codecs if `coded`. This must happen before
/// any runs: loading one may wait for those that run, and they for a rank that loads.
void load_kernels(bool coded);

// Kernels on a GPU, each set in its own file (device/move.cu, device/reduce_*.cu); in a build
// without CUDA they throw (device/calls_no_cuda.cpp).
namespace gpu {
void move(const MoveCall& call, int blocks, Stream stream);
void spoil(const SpoilCall& call, int blocks, Stream stream);
void reduce_bits(const ReduceCall& call, int blocks, Stream stream);
void reduce_float(const ReduceCall& call, DType dtype, int blocks, Stream stream);
void reduce_small_float(const ReduceCall& call, DType dtype, int blocks, Stream stream);
void reduce_integer(const ReduceCall& call, DType dtype, int blocks, Stream stream);

void load_move();
void load_float();
void load_small_float();
void load_integer();
}  // namespace gpu

}  // namespace pycomm::device
