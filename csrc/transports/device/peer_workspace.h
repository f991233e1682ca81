// Peer workspace: gives the ranks of one host each other's PeerPointers. There are two ways:
//
//   device  each rank shares memory of its GPU: peers of its process take the pointer, others open
//           it by CUDA IPC. For GPUs with peer access, and for ranks that share one.
//   host    each rank shares its part of a memory file, which all processes map and kernels reach
//           over the bus. For GPUs without peer access, and for ranks of the CPU.
//
// The working one is found by trying. The control pages lie in the file in both.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "transports/device/peer_pointers.h"
#include "transports/rendezvous.h"

namespace pycomm {

class PeerWorkspace {
 public:
  struct Options {
    std::string memory = "auto";  ///< "device", "host" or "auto"
    size_t bytes = 0;             ///< the size of each rank's data
  };

  /// `index` is our GPU, or -1 for the CPU. Throws Timeout that names the missing ranks, Error if
  /// memory cannot be shared, and whatever interrupt_check throws.
  PeerWorkspace(const Rendezvous& rendezvous, int index, const Options& options);

  const device::PeerPointers& pointers() const { return pointers_; }
  /// True if the data are in host memory.
  bool on_host() const { return on_host_; }
  /// Returns the largest number of ranks that share a GPU with one another.
  int sharers() const { return sharers_; }
  /// Keeps our shared memory until the process ends, also after this object is gone.
  void keep() noexcept;
  /// Returns the control page of any rank, for our host.
  device::ControlPage& control(int rank) const;

 private:
  struct RankInfo;

  RankInfo own_info(int index, const Options& options);
  static std::vector<RankInfo> exchange_info(const Rendezvous& rendezvous, const RankInfo& ours);
  std::string try_devices(const std::vector<RankInfo>& infos, int index);
  void use_host(int index);
  void start_counting(int index);
  size_t region() const;

  size_t bytes_;
  bool on_host_ = true;
  int sharers_ = 1;
  std::shared_ptr<void> file_;     // holds control, flags and data of each rank
  std::shared_ptr<void> control_;  // our control page as kernels see it
  std::shared_ptr<void> progress_;
  std::shared_ptr<void> shown_;                // device: our data
  std::vector<std::shared_ptr<void>> opened_;  // device: data of other processes
  std::shared_ptr<void> mapped_;               // host: the file as kernels see it
  device::PeerPointers pointers_{};
};

}  // namespace pycomm
