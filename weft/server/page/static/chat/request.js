// The body of a request for the answer to a path of messages. Knows neither browser nor server.

// The numbers of sampling that a chat may set, with their ranges; what is not set is the server's.
export const NUMBERS = [
	{ name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
	{ name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01 },
	{ name: "top_k", label: "Top k", min: 0, max: 200, step: 1 },
	{ name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
	{ name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.01 },
	{ name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.05 },
	{ name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.05 },
	{ name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
	{ name: "seed", label: "Seed", min: 0, step: 1 },
];

// Raises an Error that names the field if one of JSON is not JSON.
export function bodyOf(path, settings, model) {
	const body = { stream: true, stream_options: { include_usage: true }, return_cache_cause: true };
	if (model) body.model = model;
	body.messages = messagesOf(path, settings.system);
	for (const { name } of NUMBERS) if (Number.isFinite(settings[name])) body[name] = settings[name];
	if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
	if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
	if (settings.schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json("JSON schema", settings.schema) } };
	if (settings.more) Object.assign(body, json("further fields", settings.more));
	return body;
}

// With the last message as the beginning of the answer.
export function continued(body) {
	return { ...body, continue_final_message: true, add_generation_prompt: false };
}

export function json(what, text) {
	try {
		return JSON.parse(text);
	} catch (error) {
		throw new Error(`the ${what} is not JSON: ${error.message}`);
	}
}

export function messagesOf(path, system) {
	const messages = path.filter(says).map(message);
	if (system) messages.unshift({ role: "system", content: system });
	return messages;
}

const says = ({ role, text, calls, files }) => role === "tool" || text || calls?.length || files?.length;

function message({ role, text, files = [], calls = [], call, name }) {
	if (role === "tool") return { role, content: text, tool_call_id: call, name };
	if (role === "assistant") return calls.length ? { role, content: text || null, tool_calls: calls.map(asked) } : { role, content: text };
	const parts = files.map(part);
	if (!parts.length) return { role, content: text };
	if (text) parts.push({ type: "text", text });
	return { role, content: parts.every((one) => one.type === "text") ? parts.map((one) => one.text).join("\n\n") : parts };
}

const asked = ({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args || "{}" } });

function part({ kind, name, data, text }) {
	if (kind === "audio") return { type: "input_audio", input_audio: { data: data.slice(data.indexOf(",") + 1), format: name.split(".").pop().toLowerCase() } };
	if (kind !== "text") return { type: kind + "_url", [kind + "_url"]: { url: data } };
	const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) || []).map((marks) => marks.length + 1)));
	return { type: "text", text: `${name}:\n${fence}\n${text}\n${fence}` };
}

// ---- the pieces of an answer

// Adds an event of the stream to an answer. Raises an Error for an event of an error.
export function take(node, { error, usage, choices }) {
	if (error) throw new Error(error.message);
	if (usage) node.usage = usage;
	const choice = choices?.[0];
	if (!choice) return;
	node.end = choice.finish_reason || node.end;
	const delta = choice.delta || {};
	node.thought = (node.thought || "") + (delta.reasoning_content || delta.reasoning || "");
	node.text += delta.content || "";
	for (const { index = 0, id, function: part } of delta.tool_calls || []) {
		const call = (node.calls ??= [])[index] ??= { id: "", name: "", args: "" };
		call.id ||= id || "";
		call.name ||= part?.name || "";
		call.args += part?.arguments || "";
	}
}

// Why an answer is not whole, by its finish reason.
const CUT = {
	length: "cut at the largest number of tokens",
	content_filter: "cut by a filter",
	abort: "ended by the server",
	error: "ended by an error",
	stopped: "stopped",
	left: "the page was closed meanwhile",
	elsewhere: "comes in another tab",
};

// Whether an answer is on its way in another tab.
export const isElsewhere = ({ end }) => end === "elsewhere";

export const cutOf = ({ end }) => CUT[end] || "";
