#include "weft/comm/ucx/rendezvous.h"

#include <c10/util/Exception.h>
#include <sys/random.h>

#include <cstring>

namespace weft::comm::ucx {
namespace {

/// The head of a rank's record; its address follows, or the reason why it has none.
struct Head {
  std::array<char, 8> magic{'w', 'e', 'f', 't', '-', 'u', 'c', 'x'};
  uint32_t format = kFormat;
  uint32_t has_address = 0;
  Token part{};
};

Token random_token() {
  Token token{};
  const auto got = getrandom(token.data(), sizeof(token), 0);
  if (got != sizeof(token)) C10_THROW_ERROR(DistError, "No random bytes for the token of a network link.");
  return token;
}

std::vector<uint8_t> record(const Head& head, const std::string& text) {
  std::vector<uint8_t> bytes(sizeof(head) + text.size());
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::memcpy(bytes.data() + sizeof(head), text.data(), text.size());
  return bytes;
}

/// Puts rank `r`'s record into `all`.
void read(const UcxOptions& options, int r, const std::vector<uint8_t>& bytes, Introduction& all) {
  Head head{};
  const auto expected = head.magic;
  const bool whole = bytes.size() > sizeof(head) && bytes.size() < (1 << 20);
  if (whole) std::memcpy(&head, bytes.data(), sizeof(head));
  if (!whole || head.magic != expected || head.format != kFormat) {
    C10_THROW_ERROR(DistError,
                    c10::str("ucx link of group '", options.group, "': rank ", r,
                             " speaks another format (this rank: ", kFormat, "). Run the same weft everywhere."));
  }
  std::string text(bytes.begin() + sizeof(head), bytes.end());
  if (!head.has_address)
    C10_THROW_ERROR(DistError, c10::str("ucx link of group '", options.group, "': rank ", r, " failed: ", text));
  all.addresses[r] = std::move(text);
  all.token[0] ^= head.part[0];
  all.token[1] ^= head.part[1];
}

/// Waits for the keys of all ranks until the timeout.
void wait_for(const UcxOptions& options, const std::vector<std::string>& keys) {
  try {
    options.store->wait(keys, options.timeout);
  } catch (const std::exception& error) {
    std::string missing;
    for (size_t r = 0; r < keys.size(); ++r) {
      if (!options.store->check({keys[r]})) missing += c10::str(missing.empty() ? "" : ", ", r);
    }
    C10_THROW_ERROR(
        DistError, c10::str("ucx link of group '", options.group, "': rank ", options.rank, " waited ",
                            options.timeout.count(), " ms for rank ", missing, " to show its address: ", error.what()));
  }
}

}  // namespace

Introduction introduce(const UcxOptions& options, const std::function<std::string()>& address) {
  // Keys of an earlier link may still be there; every rank counts its links.
  const auto generation = options.store->add(c10::str("weft/ucx/links/", options.rank), 1);
  std::vector<std::string> keys;
  for (int r = 0; r < options.size; ++r) keys.push_back(c10::str("weft/ucx/", generation, "/", r));
  Introduction all{.addresses = std::vector<std::string>(options.size), .key = keys[options.rank]};

  const auto& mine = keys[options.rank];
  try {
    options.store->set(mine, record({.has_address = 1, .part = random_token()}, address()));
  } catch (const std::exception& error) {
    options.store->set(mine, record({.has_address = 0}, error.what()));
    throw;
  }
  wait_for(options, keys);
  for (int r = 0; r < options.size; ++r) read(options, r, options.store->get(keys[r]), all);
  return all;
}

void forget(const UcxOptions& options, const Introduction& introduction) {
  try {
    options.store->deleteKey(introduction.key);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): some stores cannot
  }
}

}  // namespace weft::comm::ucx
