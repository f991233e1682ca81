// Driver of the tests of other processors: codecs and reductions on what stdin says, their bytes on
// stdout. It links libpycomm, or is compiled with the sources of core and codecs.
//
// A record of stdin begins with a word of four bytes. "code": the length of a codec's text and the
// text; number of values; index; values and residual, in float32. The answer is the payload, the
// new residual and the decoded values. "fold": dtype, reduction, inputs, elements and the inputs;
// the answer is the result, and the CRC-32C of the inputs. "simd": the answer is the level of the
// processor's instructions that loops use. Numbers have 64 bits.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "codecs/base/codec.h"
#include "core/crc32c.h"
#include "core/op.h"
#include "core/reduce.h"
#include "core/simd.h"

namespace {

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

void code() {
  std::string text(number(), ' ');
  read(text.data(), text.size());
  const auto codec = pycomm::make_codec(text);
  const uint64_t numel = number(), index = number();
  const std::vector<float> values = floats(numel), residual = floats(numel);
  std::vector<uint8_t> payload(codec->encoded_bytes(numel));
  std::vector<float> owed(numel), decoded(numel);
  pycomm::EncodeArgs args;
  args.in = {values.data(), numel};
  args.out = {payload.data(), payload.size()};
  args.residual = residual.data();
  args.new_residual = owed.data();
  args.key = kKey;
  args.index = index;
  codec->encode(args);
  codec->decode({payload.data(), payload.size()}, {decoded.data(), numel}, {});
  write(payload);
  write(owed);
  write(decoded);
}

void fold() {
  const auto dtype = static_cast<pycomm::DType>(number());
  const auto op = static_cast<pycomm::ReduceOp>(number());
  const uint64_t count = number(), numel = number();
  const size_t bytes = numel * pycomm::size_of(dtype);
  std::vector<std::vector<uint8_t>> inputs(count, std::vector<uint8_t>(bytes));
  std::vector<const void*> addresses;
  std::vector<uint32_t> sums;
  for (auto& input : inputs) {
    read(input.data(), bytes);
    addresses.push_back(input.data());
    sums.push_back(pycomm::crc32c({input.data(), bytes}));
  }
  std::vector<uint8_t> out(bytes);
  pycomm::ReduceArgs args{dtype, op, addresses.data(), static_cast<int>(count), out.data()};
  args.numel = numel;
  pycomm::reduce(args);
  write(out);
  write(sums);
}

}  // namespace

int main() {
  char what[4];
  try {
    while (read(what, 4)) {
      const std::string_view word(what, 4);
      if (word == "code") code();
      if (word == "fold") fold();
      if (word == "simd") std::fputs(pycomm::simd_level(), stdout);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
