#include "transports/segment.h"

namespace pycomm {
namespace {

constexpr size_t kPage = 4096;
static_assert(sizeof(Header) % kPage == 0 && sizeof(Ring) % kPage == 0);

size_t boards_end(int ranks) {
  const size_t end = sizeof(Header) + static_cast<size_t>(ranks) * sizeof(Board);
  return (end + kPage - 1) / kPage * kPage;
}

size_t staging_end(int ranks) {
  return boards_end(ranks) + static_cast<size_t>(ranks) * kStagingBytes;
}

}  // namespace

size_t Segment::bytes(int ranks) {
  const auto n = static_cast<size_t>(ranks);
  return staging_end(ranks) + n * n * kLanes * sizeof(Ring);
}

uint8_t* Segment::staging(int rank) const {
  return base_ + boards_end(ranks_) + static_cast<size_t>(rank) * kStagingBytes;
}

Ring& Segment::ring(int from, int to, Lane lane) const {
  auto* rings = reinterpret_cast<Ring*>(base_ + staging_end(ranks_));
  return rings[(static_cast<size_t>(from) * ranks_ + to) * kLanes + static_cast<size_t>(lane)];
}

int Segment::cpus() const {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int r = 0; r < ranks_; r++) CPU_OR(&all, &all, &board(r).cpus);
  return CPU_COUNT(&all);
}

}  // namespace pycomm
