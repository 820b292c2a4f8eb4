#pragma once
#include <c10/util/Exception.h>
#include <spawn.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace bench {

/// Starts this program again as another rank: weft_bench WORDS…
inline pid_t start_rank(std::vector<std::string> words) {
  words.insert(words.begin(), "weft_bench");
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  TORCH_CHECK(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv.data(), environ) == 0, "cannot start a rank");
  return pid;
}

}  // namespace bench
