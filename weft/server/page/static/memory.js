// Memory by owner as a bar, and a thin one for each other store.

import { $, bytes, el, join, num, plural, span, take, tell, used } from "./parts.js";

const MOST_PINS = 8; // that are listed
const OWNERS = [
	["requests", "c-decode", "owned by requests, or locked by them in the prefix cache"],
	["cached", "c-cached", "kept for prompts that begin alike, until memory is needed"],
	["pinned", "c-pinned", "kept for sessions and pins"],
	["out of use", "c-bad", "their owner was not clear"],
	["free", "c-free", "free"],
];
// Of the others, what is told, and for a bar the name of the whole and of its parts.
const STORES = [
	["layers with windows: {kv_window_used} used, {kv_window_evictable} cached of {kv_window_tokens}", "kv_window_tokens", "kv_window_used", "kv_window_evictable"],
	["states: {state_slots_used} used, {state_slots_evictable} snapshots of {state_slots}", "state_slots", "state_slots_used", "state_slots_evictable"],
	["on disk: {disk_bytes} in {disk_blocks} blocks · {total_disk_hit_tokens} tokens found there · {total_disk_faults} faults"],
	["adapters: {adapter_slots_used} run in {adapter_slots} slots, {num_adapters} loaded", "adapter_slots", "adapter_slots_used"],
	["pictures, videos, sounds: {encoder_tokens} tokens kept · encoded {total_encoder_runs}, found {total_encoder_hits}"],
	["sessions: {num_sessions} open"],
	["grammars: {total_grammars} asked for, {total_grammar_hits} found compiled, {num_grammar_queue} being compiled"],
	...["prediction", "tree", "draft", "ngram"].map((source) => [
		`guesses (${source}): {total_accepted_${source}} of {total_drafts_${source}} right`, "total_drafts_" + source, "total_accepted_" + source,
	]),
];

const pool = el("div", "pool");
const legend = el("ul", "legend memory-legend");
const meters = el("div", "meters");
const pinned = el("ul", "pins");
pool.role = "img";
pinned.ariaLabel = "Pinned prompts";
$("memory").append(pool, legend, meters, pinned);
for (const [name, kind, title] of OWNERS) {
	pool.append(el("i", kind));
	legend.append(el("li", kind, name + " ", el("b")));
	pool.lastChild.title = legend.lastChild.title = title;
}

// Tokens of each owner, in the order of OWNERS.
function owners(stats) {
	const taken = [stats.kv_used, stats.kv_evictable, stats.kv_held, stats.kv_quarantined || 0];
	return [...taken, Math.max(stats.kv_tokens - sum(taken), 0)];
}

const sum = (counts) => counts.reduce((all, count) => all + count, 0);

export function show(stats, pins) {
	const counts = owners(stats);
	counts.forEach((count, i) => {
		take(pool.children[i], count / Math.max(sum(counts), 1));
		const line = legend.children[i];
		line.lastChild.textContent = num(count);
		line.hidden = i === 3 && !count;
	});
	tell("memory-text", `KV of ${num(stats.kv_tokens)} tokens · ${Math.round(100 * used(stats))} % in use`);
	pool.ariaLabel = OWNERS.map(([name], i) => `${name} ${num(counts[i])}`).join(", ") + " tokens";
	meters.replaceChildren(...STORES.flatMap((one) => store(stats, one)));
	// The one that was used last is at the top.
	pinned.replaceChildren(...pins.slice(-MOST_PINS).reverse().map(pin));
}

function pin({ name, state, tokens, tenant, uses, expires_in_s }) {
	const isFirm = state === "firm";
	const words = join(`${num(tokens)} tokens`, tenant, `used ${plural(uses, "time")}`, `for ${span(expires_in_s)}`, !isFirm && state);
	return el("li", isFirm ? "c-pinned" : "c-warn", name, el("small", "", words));
}

// The line of a store, with its numbers for their names in braces, if one of them is not 0.
function store(stats, [words, whole, ...parts]) {
	const numbers = [];
	const line = el("div", "", words.replace(/{(\w+)}/g, (_, name) => {
		numbers.push(stats[name] || 0);
		return (name.endsWith("bytes") ? bytes : num)(numbers.at(-1));
	}));
	if (whole) {
		line.append(el("div", "pool", el("i", "c-decode")));
		take(line.lastChild.firstChild, Math.min(sum(parts.map((part) => stats[part])) / stats[whole], 1));
	}
	return numbers.some(Boolean) ? [line] : [];
}
