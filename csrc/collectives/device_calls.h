// The arguments of the collective kernels, and how they are started on the device of a stream.
#pragma once
#include <algorithm>
#include <iterator>

#include "core/op.h"
#include "transports/peer_pointers.h"

namespace pycomm::device {

/// What every kernel gets.
struct Call {
  PeerPointers peers;
  uint64_t seq;         ///< number of the operation, for complaints
  uint64_t timeout_ns;  ///< for each wait
  uint64_t slot_bytes;  ///< of one block in each of the two halves of what a rank shows; 16 k
  uint32_t slots;       ///< in a half: the most blocks of any operation
  uint32_t hash;        ///< of the operation: equal where ranks call the same
};

/// A run of bytes for, or from, each rank.
struct Runs {
  uint8_t* data[kMaxPeers];
  uint64_t bytes[kMaxPeers];

  size_t longest() const { return *std::max_element(std::begin(bytes), std::end(bytes)); }
};

/// Data move and stay as they are: every rank shows what it sends, and takes what is for it.
struct MoveCall {
  Call call;
  /// What is shown: one run for all if `mine` is 0, else a run for each rank.
  Runs in;
  int runs;  ///< 1 or the number of ranks
  Runs out;  ///< what is taken from each rank; 0 bytes: nothing
};

enum class ReduceAlgo : uint8_t {
  one_shot,  ///< everybody reads all of all, and has the result
  two_shot,  ///< the owner of a chunk reads it from all, and everybody reads the results
  ring,      ///< partial sums go around, then the results
  scatter,   ///< each rank has a part of its own
};

/// One value from each rank becomes one.
struct ReduceCall {
  Call call;
  Runs in;  ///< scatter: a part for each rank; else run 0, of which all ranks have as many bytes
  uint8_t* out;
  ReduceAlgo algo;
  ReduceOp op;
  int root;  ///< who needs the result; -1: all. Not of scatter and ring
  int divisor;
  double factor;
};

void start(const MoveCall& call, int blocks, Stream stream);
/// The type and op are what lower() makes of a reduction (core/reduce.h).
void start(const ReduceCall& call, DType dtype, int blocks, Stream stream);
/// Loads all kernels onto the current GPU. To be done before any runs: loading one may wait for
/// those that run, and they for a rank that loads.
void load_kernels();

// The kernels on a GPU, each set a file (device_move.cu, device_reduce_*.cu); in a build without
// CUDA they throw (device_calls_no_cuda.cpp).
namespace gpu {
void move(const MoveCall& call, int blocks, Stream stream);
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
