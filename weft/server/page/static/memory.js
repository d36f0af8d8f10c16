// Memory by owner as a bar, and a thin one for each other store.

import { $, bytes, el, join, num, plural, span, sum, take, tell } from "./parts.js";

const MOST_PINS = 8; // that are listed
const OWNERS = { requests: "c-decode", cached: "c-cached", pinned: "c-pinned", "out of use": "c-bad", free: "c-free" };
// Of the others, what is told. A bar has the parts that stand behind a +, of what stands behind a =.
const STORES = [
	"layers with windows: {+kv_window_used} used, {+kv_window_evictable} cached of {=kv_window_tokens}",
	"states: {+state_slots_used} used, {+state_slots_evictable} snapshots of {=state_slots}",
	"on disk: {disk_bytes} in {disk_blocks} blocks · {total_disk_hit_tokens} tokens found there · {total_disk_faults} faults",
	"adapters: {+adapter_slots_used} run in {=adapter_slots} slots, {num_adapters} loaded",
	"pictures, videos, sounds: {encoder_tokens} tokens kept · encoded {total_encoder_runs}, found {total_encoder_hits}",
	"sessions: {num_sessions} open",
	"grammars: {total_grammars} asked for, {total_grammar_hits} found compiled, {num_grammar_queue} being compiled",
	...["prediction", "tree", "draft", "ngram"].map((from) => `guesses (${from}): {+total_accepted_${from}} of {=total_drafts_${from}} right`),
];

const pool = el("div", "pool");
const legend = el("ul", "legend");
const meters = el("div", "meters");
const pinned = el("ul", "pins");
pool.role = "img";
pinned.ariaLabel = "Pinned prompts";
$("memory").append(pool, legend, meters, pinned);
for (const [name, kind] of Object.entries(OWNERS)) {
	pool.append(el("i", kind));
	legend.append(el("li", kind, name + " ", el("b")));
}

// Tokens of each owner, in the order of OWNERS.
function owners(stats) {
	const pins = stats.pinned_tokens; // which are in use
	const taken = [stats.kv_used - pins, stats.kv_evictable, stats.kv_held + pins, stats.kv_quarantined];
	return [...taken, Math.max(stats.kv_tokens - sum(taken), 0)];
}

export function show(stats, pins) {
	const counts = owners(stats);
	counts.forEach((count, i) => {
		take(pool.children[i], count / Math.max(sum(counts), 1));
		const line = legend.children[i];
		line.lastChild.textContent = num(count);
		line.hidden = i === 3 && !count;
	});
	tell("memory-text", `KV of ${num(stats.kv_tokens)} tokens`);
	pool.ariaLabel = Object.keys(OWNERS).map((name, i) => `${name} ${num(counts[i])}`).join(", ") + " tokens";
	meters.replaceChildren(...STORES.flatMap((one) => store(stats, one)));
	// The one that was used last is at the top.
	pinned.replaceChildren(...pins.slice(-MOST_PINS).reverse().map(pin));
}

function pin({ name, state, tokens, tenant, uses, expires_in_s }) {
	const isFirm = state === "firm";
	const words = join(`${num(tokens)} tokens`, tenant, `used ${plural(uses, "time")}`, `for ${span(expires_in_s)}`, !isFirm && state);
	return el("li", isFirm ? "c-pinned" : "c-warn", el("bdi", "", name), el("small", "", words));
}

// The line of a store, with its numbers for their names in braces, if one of them is not 0.
function store(stats, words) {
	const counts = { "": 0, "+": 0, "=": 0 };
	const line = el("div", "", words.replace(/{([+=]?)(\w+)}/g, (_, sign, name) => {
		counts[sign] += stats[name];
		return (name.endsWith("bytes") ? bytes : num)(stats[name]);
	}));
	if (counts["="]) {
		line.append(el("div", "pool", el("i", "c-decode")));
		take(line.lastChild.firstChild, Math.min(counts["+"] / counts["="], 1));
	}
	return sum(Object.values(counts)) ? [line] : [];
}
