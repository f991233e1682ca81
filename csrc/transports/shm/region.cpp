#include "transports/shm/region.h"

#include <sys/mman.h>
#include <unistd.h>

namespace pycomm {
namespace {

static_assert(sizeof(Header) % kPart == 0 && sizeof(Ring) % kPart == 0);

size_t rank_slots_end(int ranks) {
  return round_up(sizeof(Header) + static_cast<size_t>(ranks) * sizeof(RankSlot), kPart);
}

size_t staging_end(int ranks) {
  return rank_slots_end(ranks) + static_cast<size_t>(ranks) * kStagingBytes;
}

}  // namespace

void keep_out_of_dumps(void* memory, size_t bytes) noexcept {
  ::madvise(memory, bytes, MADV_DONTDUMP);
}

size_t page_size() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

size_t SharedRegion::bytes(int ranks) {
  const auto n = static_cast<size_t>(ranks);
  return round_up(staging_end(ranks) + n * n * kLanes * sizeof(Ring), kLargestPage);
}

uint8_t* SharedRegion::staging(int rank) const {
  return base_ + rank_slots_end(ranks_) + static_cast<size_t>(rank) * kStagingBytes;
}

Ring& SharedRegion::ring(int from, int to, Lane lane) const {
  auto* rings = reinterpret_cast<Ring*>(base_ + staging_end(ranks_));
  return rings[(static_cast<size_t>(from) * ranks_ + to) * kLanes + static_cast<size_t>(lane)];
}

int SharedRegion::cpus() const {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int r = 0; r < ranks_; r++) CPU_OR(&all, &all, &rank_slot(r).cpus);
  return CPU_COUNT(&all);
}

}  // namespace pycomm
