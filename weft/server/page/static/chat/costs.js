// What an answer cost, in words: its tokens, their rate, and why its first token took its time.

import { because, button, join, num, read, tell } from "../parts.js";
import * as steps from "../engine/steps.js";
import * as story from "../engine/story.js";
import { see } from "../views.js";

// `facts`: a list of words; `why`: a sentence, empty if nothing is known.
export function costs(node) {
	return { facts: facts(node), why: why(node) };
}

function facts({ usage, firstMs, wholeMs, model }) {
	const words = [];
	if (usage) {
		const cached = usage.prompt_tokens_details?.cached_tokens;
		const seconds = (wholeMs - firstMs) / 1000;
		words.push(`${num(usage.completion_tokens)} tokens`, cached && `${num(cached)} of ${num(usage.prompt_tokens)} cached`);
		if (seconds > 0.05) words.push(`${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`);
	}
	if (firstMs) words.push(`first after ${firstMs.toFixed(0)} ms`);
	words.push(model);
	return words;
}

function why({ usage, firstMs }) {
	const details = usage?.prompt_tokens_details;
	const computed = usage?.prompt_tokens - (details?.cached_tokens || 0);
	if (!details?.cache_cause || !firstMs || !(computed > 0)) return "";
	const words = `${firstMs < 950 ? `${firstMs.toFixed(0)} ms` : `${(firstMs / 1000).toFixed(1)} s`}: ${num(computed)} prompt tokens computed, because ${because(details.cache_cause)}`;
	const { advice } = details.cache_cause;
	return advice ? `${words}. ${advice[0].toUpperCase()}${advice.slice(1)}.` : words;
}

// Buttons to the history of a request, and to its place in the steps.
export function place({ rid }) {
	if (!rid) return [];
	return [button("Story", () => story.open(rid)), button("Steps", () => show(rid))];
}

async function show(rid) {
	try {
		const { requests } = await read("requests/" + encodeURIComponent(rid), "admin");
		const entries = requests.flatMap(({ timeline }) => timeline).filter((one) => Number.isFinite(one.first_step));
		if (!entries.length) throw new Error("this request had no step");
		see("engine");
		const first = Math.min(...entries.map((one) => one.first_step));
		const last = Math.max(...entries.map((one) => one.last_step));
		steps.mark(first, last);
	} catch (error) {
		tell("state", join(error.message));
	}
}
