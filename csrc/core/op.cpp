// Names, sizes and the hash of operations.
#include "core/op.h"

#include <cstdio>
#include <cstring>

namespace pycomm {
namespace {

constexpr const char* kOpNames[] = {"none",       "all_reduce", "reduce_scatter", "all_gather",
                                    "all_to_all", "broadcast",  "reduce",         "gather",
                                    "scatter",    "barrier",    "send",           "recv"};
constexpr const char* kDTypeNames[] = {
    "float32", "float64", "float16", "bfloat16",  "float8_e4m3", "float8_e5m2",
    "int8",    "int16",   "int32",   "int64",     "uint8",       "uint16",
    "uint32",  "uint64",  "bool",    "complex64", "complex128"};
constexpr size_t kDTypeSizes[] = {4, 8, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16};
constexpr const char* kReduceOpNames[] = {"sum", "avg",  "premul_sum", "prod", "min",
                                          "max", "band", "bor",        "bxor"};
static_assert(sizeof kDTypeNames / sizeof *kDTypeNames == kDTypes);
static_assert(sizeof kDTypeSizes / sizeof *kDTypeSizes == kDTypes);
static_assert(sizeof kReduceOpNames / sizeof *kReduceOpNames == kReduceOps);

// Returns the name of a number. The numbers may come from the network, so they may be anything.
template <size_t kCount>
const char* name_in(const char* const (&names)[kCount], uint8_t number) {
  return number < kCount ? names[number] : "unknown";
}

bool reduces(Op op) { return op == Op::all_reduce || op == Op::reduce_scatter || op == Op::reduce; }

}  // namespace

const char* name(Op op) { return name_in(kOpNames, static_cast<uint8_t>(op)); }
const char* name(DType dtype) { return name_in(kDTypeNames, static_cast<uint8_t>(dtype)); }
const char* name(ReduceOp op) { return name_in(kReduceOpNames, static_cast<uint8_t>(op)); }

size_t size_of(DType dtype) {
  const auto number = static_cast<uint8_t>(dtype);
  return number < kDTypes ? kDTypeSizes[number] : 0;
}

uint32_t OpTag::hash() const {
  // FNV-1a over 64-bit words; the padding-free struct is its own serialisation.
  OpTag shared = *this;
  if (sizes_differ(op)) shared.numel = 0;
  uint64_t words[sizeof(OpTag) / 8];
  std::memcpy(words, &shared, sizeof words);
  uint64_t h = 0xcbf29ce484222325;
  for (const uint64_t word : words) {
    h = (h ^ word) * 0x100000001b3;
    h ^= h >> 32;
  }
  return static_cast<uint32_t>(h) | 1;
}

OpTag peer_tag(Op op, uint64_t bytes, int peer, int tag) {
  OpTag result;
  result.op = op;
  result.dtype = DType::uint8;
  result.numel = bytes;
  result.root = peer;
  result.codec = static_cast<uint32_t>(tag);
  return result;
}

std::string describe(const OpTag& tag) {
  std::string text = name(tag.op);
  if (tag.op == Op::send || tag.op == Op::recv) {
    return text + " of " + std::to_string(tag.numel) + " bytes " +
           (tag.op == Op::send ? "to " : "from ") +
           (tag.root < 0 ? "any rank" : "rank " + std::to_string(tag.root)) + " (tag " +
           std::to_string(static_cast<int32_t>(tag.codec)) + ")";
  }
  text += " #" + std::to_string(tag.seq);
  if (tag.op == Op::barrier || tag.op == Op::none) return text;
  text += " (";
  if (reduces(tag.op)) text += std::string(name(tag.redop)) + " of ";
  text += std::to_string(tag.numel) + " " + name(tag.dtype);
  if (tag.root >= 0) text += ", root " + std::to_string(tag.root);
  const std::string label(tag.label, strnlen(tag.label, sizeof tag.label));
  if (!label.empty()) text += ", " + label;
  return text + ")";
}

std::string describe_fully(const OpTag& tag) {
  const bool collective = tag.op != Op::send && tag.op != Op::recv;
  if (!collective || tag.codec == 0) return describe(tag);
  char digest[24];
  std::snprintf(digest, sizeof digest, " with digest %08x", tag.codec);
  return describe(tag) + digest;
}

}  // namespace pycomm
