// Several engines behind one server (--dp-size): each in small, and one of them large.

import { $, button, el, num, put, take, used } from "./parts.js";

const AWAY_MS = 3000; // without a picture
const shown = new Map(); // buttons by rank
export let rank = null; // of the one that is shown: first the first that is seen

export function clear() {
	shown.clear();
	$("engines").replaceChildren();
}

// Returns whether this picture is of the engine that is shown. `chosen` is called when that changes.
export function show({ rank: seen, stats }, chosen) {
	rank ??= seen;
	if (!shown.has(seen)) add(seen, chosen);
	const choice = shown.get(seen);
	const [words, pool] = choice.children;
	choice.seenAt = performance.now();
	words.textContent = `${num(stats.num_running)} running, ${num(stats.num_waiting)} waiting · KV ${Math.round(100 * used(stats))} %`;
	take(pool.firstChild, used(stats));
	for (const one of shown.values()) {
		if (choice.seenAt - one.seenAt > AWAY_MS) put(one.children[0], "does not answer");
	}
	return seen === rank;
}

function add(seen, chosen) {
	const choice = button(`Engine ${seen}`, () => {
		rank = seen;
		mark();
		chosen();
	}, "");
	choice.append(el("small"), el("span", "pool", el("i", "c-decode")));
	shown.set(seen, choice);
	mark();
	choice.style.order = seen;
	$("engines").append(choice);
	$("engines").hidden = shown.size < 2;
}

function mark() {
	for (const [one, choice] of shown) choice.ariaPressed = one === rank;
}
