// Runs a fuzz target without libFuzzer: mutates a corpus, by a seed, for some time.
//
//   fuzz_frames CORPUS... --seconds 600 --seed 1   the last line says how many inputs ran
//   fuzz_frames FILE                               an input that failed, again
//
// An input that fails is written to fuzz-failure-<seed>.bin, and the sanitizer ends the process.
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "tests/fuzz/target.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace {

using Input = std::string;
using Chance = std::mt19937_64;

Input running;
unsigned long seed = 1;

void save_running() {
  const std::string name = "fuzz-failure-" + std::to_string(seed) + ".bin";
  std::ofstream(name, std::ios::binary) << running;
  std::fprintf(stderr, "the input is in %s\n", name.c_str());
}

void run(const Input& input) {
  running = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

size_t below(Chance& chance, size_t limit) { return limit == 0 ? 0 : chance() % limit; }

void mutate(Input& input, const Input& other, Chance& chance) {
  constexpr char kTelling[] = {0, 1, 2, 16, 32, 64, 100, 127, -128, -2, -1};
  constexpr size_t kLongest = 1 << 14;
  const size_t at = below(chance, input.size());
  switch (chance() % 8) {
    case 0:
    case 1:
      if (!input.empty()) input[at] = static_cast<char>(input[at] ^ 1 << chance() % 8);
      break;
    case 2:
      if (!input.empty()) input[at] = static_cast<char>(chance());
      break;
    case 3:
      if (!input.empty()) input[at] = kTelling[chance() % sizeof kTelling];
      break;
    case 4:
      input.erase(at, below(chance, 16));
      break;
    case 5:
      for (size_t i = below(chance, 16); i > 0; i--) {
        input.insert(at, 1, static_cast<char>(chance()));
      }
      break;
    case 6: {  // some of another
      const size_t from = below(chance, other.size());
      input.replace(at, below(chance, 64), other.substr(from, below(chance, 64)));
      break;
    }
    case 7:
      input = input.substr(0, at) + other.substr(std::min(at, other.size()));
      break;
  }
  if (input.size() > kLongest) input.resize(kLongest);
}

Input read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Input> corpus;
  double seconds = 0;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (word == "--seconds") {
      seconds = std::atof(value());
    } else if (word == "--seed") {
      seed = std::strtoul(value(), nullptr, 10);
    } else if (std::filesystem::is_directory(word)) {
      for (const auto& entry : std::filesystem::directory_iterator(word)) {
        corpus.push_back(read(entry.path()));
      }
    } else {
      corpus.push_back(read(word));
    }
  }
  __sanitizer_set_death_callback(save_running);
  for (const Input& input : corpus) run(input);
  unsigned long count = corpus.size();
  Chance chance(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!corpus.empty() && std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 100; i++, count++) {
      Input input = corpus[below(chance, corpus.size())];
      const Input& other = corpus[below(chance, corpus.size())];
      for (size_t n = 1 + below(chance, 6); n > 0; n--) mutate(input, other, chance);
      run(input);
    }
  }
  std::printf("%lu inputs, seed %lu, 0 findings\n", count, seed);
}
