// Kernel of collectives that move data: all_gather, all_to_all, broadcast, gather, scatter, and the
// barrier, which moves none.
#pragma once
#include "collectives/device/barrier.h"

namespace pycomm::device {

/// Bytes before each slot, with the rounds that its rank needs. Only that rank knows, as sizes may
/// differ.
constexpr size_t kSlotHead = 64;

/// Returns false if a rank did not arrive.
template <typename Machine>
PYCOMM_KERNEL bool move_all(const Machine& m, const MoveCall& args) {
  const int n = args.call.peers.ranks, self = args.call.peers.rank;
  const int b = m.block(), blocks = m.blocks();
  // A slot has a place for each run, all of one size.
  const size_t room = (args.call.slot_bytes - kSlotHead) / args.runs / 16 * 16;
  const auto place = [&](int run) { return kSlotHead + run * room; };

  size_t longest = 0;
  for (int r = 0; r < args.runs; r++) {
    const size_t bytes = share(args.in.bytes[r], blocks, b).size();
    longest = bytes > longest ? bytes : longest;
  }
  uint64_t rounds = (longest + room - 1) / room;

  DeviceBarrier<Machine> rendezvous(m, args.call);
  if (!rendezvous.start()) return false;
  // There is at least one round: ranks without data learn of the others' there.
  for (uint64_t round = 0; round == 0 || round < rounds; round++) {
    uint8_t* const shown = rendezvous.writes(self);
    if (round == 0 && m.thread() == 0) *reinterpret_cast<uint64_t*>(shown) = rounds;
    for (int r = 0; r < args.runs; r++) {
      const Share part = part_of(share(args.in.bytes[r], blocks, b), round * room, room);
      copy(m, shown + place(r), args.in.data[r] + part.begin, part.size());
    }
    if (!rendezvous.arrive_wait()) return false;
    for (int i = 0; i < n; i++) {
      const int r = (self + i) % n;  // starts with another rank on each
      const uint8_t* const theirs = rendezvous.reads(r);
      if (round == 0) {
        const uint64_t wanted = *reinterpret_cast<const uint64_t*>(theirs);
        rounds = wanted > rounds ? wanted : rounds;
      }
      const Share part = part_of(share(args.out.bytes[r], blocks, b), round * room, room);
      copy(m, args.out.data[r] + part.begin, theirs + place(args.runs > 1 ? self : 0), part.size());
    }
  }
  rendezvous.end();
  return true;
}

template <typename Machine>
PYCOMM_KERNEL void move(const Machine& m, const MoveCall& args) {
  if (move_all(m, args)) return;
  for (int r = 0; r < args.call.peers.ranks; r++) {
    const Share part = share(args.out.bytes[r], m.blocks(), m.block());
    spoil(m, args.out.data[r] + part.begin, part.size());
  }
}

/// Overwrites the result of an operation of several kernels if a barrier has failed.
template <typename Machine>
PYCOMM_KERNEL void spoil_if_broken(const Machine& m, const SpoilCall& args) {
  if (m.load_relaxed(&args.progress->broken) == 0) return;
  const Share part = share(args.bytes, m.blocks(), m.block());
  spoil(m, args.result + part.begin, part.size());
  if (args.found_inf && m.thread() == 0) *args.found_inf = 1.0f;
}

}  // namespace pycomm::device
