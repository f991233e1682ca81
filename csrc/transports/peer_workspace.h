// How the ranks of one host come to each other's PeerPointers. Two ways:
//
//   device  each rank shows memory of its GPU: peers of its process take the pointer, others open
//           it by CUDA IPC. For GPUs with peer access, and for ranks that share one.
//   host    each rank shows its part of a memory file, which all processes map and kernels reach
//           over the bus. For GPUs without peer access, and for ranks of the CPU.
//
// Which of them works is found by trying. The control pages lie in the file in both.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "transports/peer_pointers.h"
#include "transports/transport.h"

namespace pycomm {

class PeerWorkspace {
 public:
  struct Options {
    std::string memory = "auto";  ///< "device", "host" or "auto"
    size_t bytes = 0;             ///< that each rank shows
    uint32_t first_meeting = 0;   ///< where counting starts
  };

  /// `index` is our GPU, or -1 for the CPU. Throws Timeout that names the ranks that did not come,
  /// and Error if memory cannot be shared.
  PeerWorkspace(const Rendezvous& meeting, int index, const Options& options);

  const device::PeerPointers& pointers() const { return pointers_; }
  /// True if data are shown in host memory.
  bool on_host() const { return on_host_; }
  /// The most ranks that share a GPU with one another.
  int sharers() const { return sharers_; }
  /// That of any rank, for our host.
  device::Control& control(int rank) const;

 private:
  struct Word;

  Word introduce(int index, const Options& options);
  static std::vector<Word> exchange_words(const Rendezvous& meeting, const Word& ours);
  std::string try_devices(const std::vector<Word>& words, int index);
  void use_host(int index);
  void start_counting(uint32_t first, int index);
  size_t region() const;

  size_t bytes_;
  bool on_host_ = true;
  int sharers_ = 1;
  std::shared_ptr<void> file_;     // control, flags and data of each rank
  std::shared_ptr<void> control_;  // as kernels see ours
  std::shared_ptr<void> progress_;
  std::shared_ptr<void> shown_;                // device: ours
  std::vector<std::shared_ptr<void>> opened_;  // device: of other processes
  std::shared_ptr<void> mapped_;               // host: the file as kernels see it
  device::PeerPointers pointers_{};
};

}  // namespace pycomm
