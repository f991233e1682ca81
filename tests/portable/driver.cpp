// Driver of the tests of other processors: codecs, reductions and collectives on what stdin says,
// their bytes on stdout. It links libpycomm, or is compiled with its sources.
//
// A record of stdin begins with a word of four bytes. "code": the length of a codec's text and the
// text; number of values; index; values and residual, in float32. The answer is the payload, the
// new residual and the decoded values. "fold": dtype, reduction, inputs, elements, how a thread of
// AArch64 is set to calculate, and the inputs; the answer is the result, and the CRC-32C of the
// inputs. "simd": the answer is the level of the processor's instructions that loops use, and the
// ways to a CRC-32C. "join": the folder in which the ranks of a group meet, rank and ranks; there
// is no answer. "move": number of values, and values; the answer is their sum over the ranks, those
// of the last rank, and those of all ranks. "step": the text of a codec, steps, number of values,
// and the values of each step; the answer is the averages, then the residuals of the worker and of
// the owner. Numbers have 64 bits, and a text has its length before it.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "codecs/base/codec.h"
#include "collectives/communicator.h"
#include "core/crc32c.h"
#include "core/op.h"
#include "core/reduce.h"
#include "core/simd.h"
#include "transports/store.h"

namespace {

using pycomm::DType;
using pycomm::Op;
using pycomm::Span;

/// The key of the golden vectors: tests/golden/__main__.py.
constexpr pycomm::RandomKey kKey{0x0123456789ABCDEF, 7, 0xFEDCBA98};

template <typename T>
bool read(T* to, size_t count) {
  return std::fread(to, sizeof(T), count, stdin) == count;
}
template <typename T>
void write(const std::vector<T>& from) {
  std::fwrite(from.data(), sizeof(T), from.size(), stdout);
}
uint64_t number() {
  uint64_t value = 0;
  read(&value, 1);
  return value;
}
std::vector<float> floats(uint64_t count) {
  std::vector<float> values(count);
  read(values.data(), count);
  return values;
}
std::string text() {
  std::string value(number(), ' ');
  read(value.data(), value.size());
  return value;
}

void code() {
  const auto codec = pycomm::make_codec(text());
  const uint64_t numel = number(), index = number();
  const std::vector<float> values = floats(numel), residual = floats(numel);
  std::vector<uint8_t> payload(codec->encoded_bytes(numel));
  std::vector<float> owed(numel), decoded(numel);
  pycomm::EncodeArgs args;
  args.in = {values.data(), numel};
  args.out = {payload.data(), payload.size()};
  args.residual = {reinterpret_cast<const uint8_t*>(residual.data()),
                   reinterpret_cast<uint8_t*>(owed.data())};
  args.key = kKey;
  args.index = index;
  codec->encode(args);
  codec->decode({payload.data(), payload.size()}, {decoded.data(), numel}, {});
  write(payload);
  write(owed);
  write(decoded);
}

/// Sets the register FPCR, where there is one, and returns what it was.
uint64_t set_fpcr(uint64_t to) {
  uint64_t before = 0;
#ifdef __aarch64__
  asm volatile("mrs %0, fpcr" : "=r"(before)::"memory");
  asm volatile("msr fpcr, %0" ::"r"(to) : "memory");
#endif
  (void)to;
  return before;
}

uint32_t checksum(const std::vector<uint8_t>& data) {
  const Span<const uint8_t> bytes{data.data(), data.size()};
  const uint32_t sum = pycomm::crc32c(bytes);
  for (const std::string& way : pycomm::crc32c_ways()) {
    if (pycomm::crc32c_by(way, bytes) != sum) throw std::runtime_error("CRC-32C by " + way);
  }
  return sum;
}

void fold() {
  const auto dtype = static_cast<DType>(number());
  const auto op = static_cast<pycomm::ReduceOp>(number());
  const uint64_t count = number(), numel = number(), fpcr = number();
  const size_t bytes = numel * pycomm::size_of(dtype);
  std::vector<std::vector<uint8_t>> inputs(count, std::vector<uint8_t>(bytes));
  std::vector<const void*> addresses;
  std::vector<uint32_t> sums;
  for (auto& input : inputs) {
    read(input.data(), bytes);
    addresses.push_back(input.data());
    sums.push_back(checksum(input));
  }
  std::vector<uint8_t> out(bytes);
  pycomm::ReduceArgs args{dtype, op, addresses.data(), static_cast<int>(count), out.data()};
  args.numel = numel;
  set_fpcr(fpcr);
  if (op == pycomm::ReduceOp::premul_sum) {
    pycomm::scale(dtype, addresses[0], out.data(), numel, 0.3);
  } else {
    pycomm::reduce(args);
  }
  if (set_fpcr(0) != fpcr) throw std::runtime_error("a thread is set otherwise than before");
  write(out);
  write(sums);
}

std::unique_ptr<pycomm::Communicator> join() {
  const std::string folder = text();
  const auto rank = static_cast<int>(number()), ranks = static_cast<int>(number());
  pycomm::CommunicatorOptions options;
  options.transport = "tcp";
  for (int node = 0; node < ranks; ++node) options.nodes.push_back(node);
  options.timeout = pycomm::Milliseconds(60000);
  return std::make_unique<pycomm::Communicator>(pycomm::make_file_store(folder), rank, ranks,
                                                options);
}

void move(pycomm::Communicator& group) {
  const uint64_t numel = number();
  std::vector<float> mine = floats(numel), last = mine;
  std::vector<float> all(numel * static_cast<size_t>(group.size()));
  pycomm::Collective call{
      Op::broadcast, DType::float32, {last.data(), numel}, {last.data(), numel}};
  call.root = group.size() - 1;
  group.run(call);
  group.run({Op::all_gather, DType::float32, {mine.data(), numel}, {all.data(), numel}});
  group.run({Op::all_reduce, DType::float32, {mine.data(), numel}, {mine.data(), numel}});
  write(mine);
  write(last);
  write(all);
}

void step(pycomm::Communicator& group) {
  const auto codec = pycomm::make_codec(text());
  const uint64_t steps = number(), numel = number();
  std::vector<float> worker[2], owner[2];
  for (auto* sides : {worker, owner}) sides[0] = sides[1] = std::vector<float>(numel);
  const auto memory = [](const std::vector<float>& old, std::vector<float>& fresh) {
    return pycomm::feedback::Memory{reinterpret_cast<const uint8_t*>(old.data()),
                                    reinterpret_cast<uint8_t*>(fresh.data())};
  };
  for (uint64_t i = 0; i < steps; i++) {
    std::vector<float> values = floats(numel);
    pycomm::Piece piece;
    piece.numel = numel;
    piece.codec = codec.get();
    piece.worker.error = memory(worker[i % 2], worker[(i + 1) % 2]);
    piece.owner.error = memory(owner[i % 2], owner[(i + 1) % 2]);
    pycomm::CodedArgs args;
    args.data = {values.data(), numel, DType::float32};
    args.pieces = {&piece, 1};
    args.seed = 7;
    args.step = static_cast<uint32_t>(i);
    if (!group.run_coded(Op::all_reduce, args)) throw std::runtime_error("Inf or NaN");
    write(values);
  }
  write(worker[steps % 2]);
  write(owner[steps % 2]);
}

}  // namespace

int main() {
  char what[4];
  std::unique_ptr<pycomm::Communicator> group;
  try {
    while (read(what, 4)) {
      const std::string_view word(what, 4);
      if (word == "code") code();
      if (word == "fold") fold();
      if (word == "join") group = join();
      if (word == "move") move(*group);
      if (word == "step") step(*group);
      if (word != "simd") continue;
      std::fputs(pycomm::simd_level(), stdout);
      for (const std::string& way : pycomm::crc32c_ways()) std::printf(" %s", way.c_str());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
