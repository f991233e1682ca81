// Ranks of one host whose data lie on GPUs: collectives by kernels that read and write each other's
// memory through peer pointers (docs/algorithms.md, "On a GPU").
//
// Calls queue kernels on the caller's stream and return; nothing waits, nothing is allocated, so
// they can be captured in a CUDA graph. All ranks make the same calls in the same order; those of
// one rank must follow each other, so on several streams by events. Results are those of
// Communicator, bit for bit.
//
// A rank of the CPU (Device::cpu) runs the same kernels on the calling thread, over shared memory:
// what is tested there is what runs on a GPU without peer access.
#pragma once
#include <memory>
#include <string>

#include "collectives/communicator.h"

namespace pycomm {

struct DeviceGroupOptions {
  std::string group = "default";  ///< unique in the store
  Milliseconds timeout = env().timeout;
  /// Where ranks show each other their data: "device" (peer access between GPUs), "host" (host
  /// memory that kernels reach), or "auto": device if all ranks reach each other, which is tried.
  std::string memory = "auto";
  /// Memory of each rank for what it shows: of exact collectives, and of those with codecs, whose
  /// payloads of one tensor that cannot be cut must fit.
  size_t staging_bytes = kStagingBytes;
  size_t coded_bytes = kCodedBytes;
  static constexpr size_t kStagingBytes = size_t{32} << 20, kCodedBytes = size_t{64} << 20;
  /// Thread blocks of a collective; 0: chosen so that those of all ranks on a GPU run at once, as
  /// they wait for each other.
  int blocks = 0;
  /// For tests: where the count of meetings starts, so that it soon passes 2^32.
  uint32_t first_meeting = 0;
};

/// The largest group: eight or sixteen GPUs is what a host has.
constexpr int kMaxDeviceRanks = 16;

class PYCOMM_API DeviceGroup {
 public:
  /// Meets the other ranks. `index` is our GPU, or -1 for the CPU. Throws Timeout with the ranks
  /// that did not come, and Error if ranks share no memory or their options differ.
  DeviceGroup(std::shared_ptr<Store> store, int rank, int size, int index,
              DeviceGroupOptions options = {});
  /// The caller has synchronised with its streams, and peers no longer work with us.
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int rank() const;
  int size() const;
  int index() const;
  /// "4 ranks: peer access, 32 blocks" and the like, for people.
  std::string describe() const;
  void set_timeout(Milliseconds timeout);

  // Collectives; buffers are memory of our GPU, parts as those of Communicator. Bad arguments throw
  // Error at once; all else comes by check().

  /// `algo` is "auto", "one_shot", "two_shot" or "ring". Auto never takes the ring, whose sums have
  /// another order, and which two_shot equals in bytes.
  void all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, Stream stream,
                  double factor = 1.0, const std::string& algo = "auto");
  void reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op, Stream stream,
                      double factor = 1.0);
  /// `out` is written at the root only; elsewhere it may be null.
  void reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op, int root,
              Stream stream, double factor = 1.0);
  void all_gather(const void* in, const Parts& out, DType dtype, Stream stream);
  void all_to_all(const ConstParts& in, const Parts& out, DType dtype, Stream stream);
  void broadcast(void* data, size_t numel, DType dtype, int root, Stream stream);
  void gather(const void* in, size_t numel, const Parts& out, DType dtype, int root, Stream stream);
  void scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root, Stream stream);
  /// What is queued behind it starts when all ranks have come here.
  void barrier(Stream stream);

  // With codecs; dtypes and pieces as those of Communicator. On a GPU feedback is of kind residual,
  // stored as float32 in its memory. `found_inf`, in memory of our GPU, becomes 1 if a value of the
  // result is Inf or NaN on any rank, else stays as it was; null: nobody asks.

  /// How much scratch memory the stream of such an operation must bring. Throws Error if it cannot
  /// be: by its feedback, or since a tensor that cannot be cut does not fit in coded_bytes. The
  /// answer is that of all ranks.
  size_t coded_scratch_bytes(Op op, const CodedArgs& args) const;
  void all_reduce_coded(const CodedArgs& args, Stream stream, float* found_inf = nullptr);
  void reduce_scatter_coded(const CodedArgs& args, void* out, Stream stream,
                            float* found_inf = nullptr);
  void all_gather_coded(const CodedArgs& args, void* out, Stream stream,
                        float* found_inf = nullptr);

  /// Throws what a kernel has reported since the start, if anything: Timeout that names the rank it
  /// waited for and the operation, WireMismatch, or Error with the reason of an abort. After that
  /// the group is over. Never waits; any thread.
  void check() const;
  /// Ends every running and later operation on all ranks with `reason`. Any thread, any time.
  void abort(const std::string& reason) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pycomm
