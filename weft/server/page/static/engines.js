// Several engines behind one server (--dp-size): each in small, and one of them large.

import { $, button, el, num } from "./parts.js";

export class Engines {
	// `chosen` is called when the user has chosen another one.
	constructor(chosen) {
		this.chosen = chosen;
		this.rank = null; // of the one that is shown: first the first that is seen
		this.shown = new Map();
	}

	clear() {
		this.shown.clear();
		$("engines").replaceChildren();
	}

	// Returns whether this picture is of the engine that is shown.
	show({ rank, stats }) {
		this.rank ??= rank;
		let one = this.shown.get(rank);
		if (!one) {
			one = this.add(rank);
			$("engines").hidden = this.shown.size < 2;
		}
		const share = stats.kv_used / Math.max(stats.kv_tokens, 1);
		one.words.textContent = `${num(stats.num_running)} running, ${num(stats.num_waiting)} waiting · KV ${Math.round(100 * share)} %`;
		one.used.style.setProperty("--p", share.toFixed(4));
		return rank === this.rank;
	}

	add(rank) {
		const made = { rank, choice: button(`Engine ${rank}`, () => this.choose(rank), ""), words: el("small"), used: el("i", "c-decode") };
		const pool = el("span", "pool");
		pool.append(made.used);
		made.choice.append(made.words, pool);
		made.choice.setAttribute("aria-pressed", String(rank === this.rank));
		this.shown.set(rank, made);
		const all = [...this.shown.values()].sort((a, b) => a.rank - b.rank);
		$("engines").replaceChildren(...all.map((one) => one.choice));
		return made;
	}

	choose(rank) {
		this.rank = rank;
		for (const one of this.shown.values()) one.choice.setAttribute("aria-pressed", String(one.rank === rank));
		this.chosen();
	}
}
